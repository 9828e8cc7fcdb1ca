"""Data plane of Relax. Importing it needs neither torch nor ray."""
