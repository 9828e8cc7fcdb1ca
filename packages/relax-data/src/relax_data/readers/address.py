"""Addresses of Hugging Face datasets: ``hf://OWNER/NAME?config=...&split=...&revision=...``."""

import re

from relax_data.errors import DataError

HUB = "hf://"
"""How such an address begins."""
_HUB_ADDRESS = re.compile(r"^hf://(?P<name>[^?]+)(\?(?P<options>.*))?$")
_HUB_OPTIONS = ("config", "split", "revision")


def split_hub_address(address: str) -> tuple[str, dict[str, str]]:
    """The name of the dataset in ``hf://OWNER/NAME?config=C&split=S&revision=R``, and its options.

    Raises:
        DataError: it is written wrong, or has an option that does not exist or stands twice.
    """
    match = _HUB_ADDRESS.match(address)
    if match is None:
        raise DataError(f"{address}: write hf://OWNER/NAME, with ?config=C&split=S where it has several")
    options: dict[str, str] = {}
    for part in (match["options"] or "").split("&"):
        key, _, value = part.partition("=")
        if part and (key not in _HUB_OPTIONS or not value):
            raise DataError(f"{address}: unknown option {part!r}; known are config=, split= and revision=")
        if key in options:
            raise DataError(f"{address}: {key}= is given twice; remove one")
        if part:
            options[key] = value
    return match["name"], options
