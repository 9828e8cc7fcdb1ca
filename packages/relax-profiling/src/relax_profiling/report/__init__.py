"""The report: everything that the traces and recordings of a run say, as data, as text and as one HTML page."""
