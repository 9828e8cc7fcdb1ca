"""`relax`: the front door."""
