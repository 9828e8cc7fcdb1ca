"""The report: everything that the traces and recordings of a run say, as data, as text and as one HTML page.

Door: :func:`relax_profiling.report.build.build_report`; a rule of advice is a function of
:mod:`relax_profiling.report.advice`.
"""
