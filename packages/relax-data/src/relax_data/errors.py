"""Errors that speak to the user about their data."""


class DataError(ValueError):
    """Data that cannot be used. The message names the file, the line or row, and the key, and what to do."""
