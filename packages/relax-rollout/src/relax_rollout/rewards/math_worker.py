"""The worker process of ``--rm-type math``: ``python -m relax_rollout.rewards.math_worker``.

Reads lines ``{"response", "label", "cpu_limit_s"}`` from stdin, answers each with one line ``{"reward"}``,
``{"bad_label"}`` (why the label cannot be read) or ``{"error"}`` (a traceback), and ends when stdin does.
"""

import functools
import json
import os
import resource
import sys
import traceback
from typing import Any

from relax_rollout.rewards.math_labels import Gold, LabelError, answer_text, plain_text, read_label

MEMORY_LIMIT = 8 << 30
"""Bytes of address space: a response may ask for a number that fills the machine."""


def main() -> None:
    """Answers one request a line on standard input, until it ends."""
    # math-verify and sympy may print: the answers keep stdout for themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers)

    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, resource.getrlimit(resource.RLIMIT_AS)[1]))
        import math_verify  # noqa: F401 - its import takes seconds; before the first time limit starts
    except Exception:
        answer({"error": traceback.format_exc()})
        return
    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        _limit_cpu(request["cpu_limit_s"])
        try:
            answer({"reward": compare(request["response"], request["label"])})
        except LabelError as e:
            answer({"bad_label": str(e)})
        except Exception:
            answer({"error": traceback.format_exc()})


def _limit_cpu(seconds: float) -> None:
    """Lets the kernel end this process (SIGXCPU) if nobody is left to kill it while it computes."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 30, hard))


@functools.lru_cache(maxsize=256)
def gold(label: str) -> Gold | list[Any]:
    """The label as math-verify's expressions, or a :class:`Gold` with the text that it is compared as.

    Raises:
        LabelError: it cannot be read whole; the message says why and what to write instead.
    """
    from math_verify import LatexExtractionConfig, parse

    try:
        found = read_label(label)
        if found.text is not None:
            return found
        # Only the last formula, and no number in place of one that cannot be parsed.
        expected = parse(found.latex, [LatexExtractionConfig()], extraction_mode="first_match", parsing_timeout=None)
        if not expected or isinstance(expected[0], str):
            raise LabelError("it is no mathematical expression")
    except LabelError as e:
        raise LabelError(
            f"the label {label[:200]!r} cannot be compared: {e}; correct the row (a number, a formula between dollars, "
            "a few words), or use --rm-type exact-match or --custom-rm-path"
        ) from None
    if found.latex.endswith("%"):
        # math-verify leaves a boxed percentage as text.
        number = found.latex.strip("$%")
        expected += [f"{number}\\%", f"{number}%"]
    return list(expected)


def compare(response: str, label: str) -> float:
    """1.0 when the answer in ``response`` equals ``label`` (the last boxed expression, else the last formula).

    Time is limited from outside, so math-verify's own alarms are off.

    Raises:
        LabelError: the label cannot be read whole.
    """
    from math_verify import parse, verify

    expected = gold(label)
    written = plain_text(answer_text(response))
    if isinstance(expected, Gold):
        assert expected.text is not None, "formulas are parsed"
        return float(written == plain_text(expected.text))
    if written == plain_text(label):
        return 1.0  # math-verify reads an answer without marks in part
    found = parse(response, parsing_timeout=None)
    return float(bool(found) and verify(expected, found, timeout_seconds=None))


if __name__ == "__main__":
    main()
