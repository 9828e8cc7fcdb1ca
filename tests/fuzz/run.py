"""Fuzzes for as long as you like: ``uv run python tests/fuzz/run.py --seconds 600``.

Every case that fails is printed with its seed and number, and its files are kept; the same seed and number make it
again: ``uv run python tests/fuzz/run.py --target rows --seed 7 --case 1234``.
"""

import argparse
import contextlib
import faulthandler
import logging
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.targets import TARGETS, Target, run_case

_HANGS_AFTER = 120
"""Seconds that no case may take on any machine; the process then ends and says where it was."""


def main() -> int:
    """Runs cases until the time is over; 1 when any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--target", choices=[t.name for t in TARGETS], action="append")
    parser.add_argument("--case", type=int, help="run this one only")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="folder for what failed")
    arguments = parser.parse_args()
    targets = [t for t in TARGETS if not arguments.target or t.name in arguments.target]
    print(f"seed {arguments.seed}")
    logging.disable(logging.CRITICAL)
    deadline = time.monotonic() + arguments.seconds
    counts = {t.name: 0 for t in targets}
    failures: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["RELAX_CACHE_DIR"] = f"{scratch}/cache"
        number = 0 if arguments.case is None else arguments.case
        while time.monotonic() < deadline:
            for target in targets:
                _one(target, arguments.seed, number, Path(scratch) / target.name, arguments.keep, failures)
                counts[target.name] += 1
            number += 1
            if arguments.case is not None:
                break
    for name, count in counts.items():
        print(f"{name}: {count} cases")
    for what, times in failures.items():
        print(f"FAILED {times} times: {what}")
    return 1 if failures else 0


def _one(target: Target, seed: int, number: int, folder: Path, keep: Path, failures: dict[str, int]) -> None:
    faulthandler.dump_traceback_later(_HANGS_AFTER, exit=True)
    if sys.stderr.isatty():
        print(f"\r{target.name} {number}    ", end="", file=sys.stderr, flush=True)
    try:
        with contextlib.redirect_stdout(None):
            run_case(target, seed, number, folder)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{target.name}: {type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}"
        failures[what] = failures.get(what, 0) + 1
        if failures[what] == 1:
            kept = keep / f"{target.name}-{seed}-{number}"
            shutil.copytree(folder, kept, dirs_exist_ok=True)
            print(f"\n{what}\n  --target {target.name} --seed {seed} --case {number}; its files: {kept}")
            traceback.print_exc(limit=-6)
    finally:
        faulthandler.cancel_dump_traceback_later()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
