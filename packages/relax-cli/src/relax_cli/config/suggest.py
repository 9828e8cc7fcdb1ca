"""Finds the valid name that the user probably meant."""

import difflib
from collections.abc import Callable, Iterable


def nearest(name: str, valid: Iterable[str], limit: int = 3) -> list[str]:
    """The valid names nearest to a wrong one, best first.

    A name that only differs in ``-`` and ``_`` is the only one; else close spellings, then names that begin with it
    (someone abbreviated), then names that hold all of its words.

    Args:
        name: what the user wrote, without leading dashes.
        valid: all names there are.
        limit: how many names to return at most.
    """

    def plain(text: str) -> str:
        return text.lower().replace("_", "-").strip("-")

    wanted = plain(name)
    by_plain = {plain(v): v for v in sorted(valid)}
    if wanted in by_plain:
        return [by_plain[wanted]]
    found = difflib.get_close_matches(wanted, list(by_plain), n=limit, cutoff=0.75)
    if len(wanted) >= 3:
        found += sorted((v for v in by_plain if v.startswith(wanted)), key=len)
        words = set(wanted.split("-"))
        found += sorted((v for v in by_plain if words <= set(v.split("-"))), key=len)
    if not found:
        found = difflib.get_close_matches(wanted, list(by_plain), n=1, cutoff=0.6)
    return [by_plain[v] for v in dict.fromkeys(found)][:limit]


def did_you_mean(written: str, valid: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """``; did you mean --a or --b?``, or nothing when no name is near.

    Args:
        spell: how a name is written where the user wrote it.
    """
    shown = [spell(name) for name in nearest(written, valid)]
    if not shown:
        return ""
    return "; did you mean " + (shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " or " + shown[-1]) + "?"
