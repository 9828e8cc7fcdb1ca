"""Holds a real SGLang server in the middle of its responses, for as long as a test needs, on a machine of any speed.

The server is started with a forward hook of ours (SGLang's ``--forward-hooks``). While one file exists, each forward
pass takes :data:`PASS_S` seconds: requests stay in flight then, and between two passes the server answers everything
else. Another file names a pass that is held until the file is gone, so that a test can act at an exact token; a third
one a bucket of the next push over a process group.
A module of its own, without heavy imports, because the server imports it by name.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PASS_S = 0.2
"""One token of each running request takes this long while the gate is closed: 1500 tokens take five minutes."""
KEY = "key-of-the-tests"
"""Of the servers that tests start themselves."""
DEADLINE_S = 240.0
"""Seconds after which a request that is still not running at the server is a failure."""


def make_hook(config: dict[str, str]) -> Callable[..., None]:
    """The hook that SGLang asks for: called after each forward pass of the model."""
    closed, order, held = config["closed"], Path(config["order"]), Path(config["held"])
    passes, current = 0, ""
    _hold_buckets(Path(config["bucket_order"]), held)

    def hook(*_: Any) -> None:
        nonlocal passes, current
        if text := _read(order):
            if text != current:
                passes, current = 0, text
            passes += 1
            if passes == int(text.split()[0]):
                held.touch()
                _wait_until_gone(order)
        end = time.monotonic() + PASS_S
        while os.path.exists(closed) and time.monotonic() < end:
            time.sleep(0.005)

    return hook


def _hold_buckets(order: Path, held: Path) -> None:
    """Has this server hold the bucket that the order names, before it receives it."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    load = WeightUpdater.update_weights_from_distributed
    first, number = "", 0

    def hold_and_load(self: Any, names: list[str], *others: Any) -> Any:
        nonlocal first, number
        first = first or names[0]
        number = 1 if names[0] == first else number + 1
        bucket, _, host = _read(order).partition(" ")
        if bucket == str(number) and f"--host {host} " in " ".join(sys.argv):
            held.touch()
            _wait_until_gone(order)
        return load(self, names, *others)

    WeightUpdater.update_weights_from_distributed = hold_and_load


def _wait_until_gone(order: Path) -> None:
    end = time.monotonic() + DEADLINE_S
    while order.exists() and time.monotonic() < end:
        time.sleep(0.002)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


class Gate:
    """The gate of one server."""

    def __init__(self, folder: Path) -> None:
        self._closed = folder / "gate-closed"
        self._order, self._held = folder / "gate-order", folder / "gate-held"
        self._bucket_order = folder / "gate-bucket-order"

    def options(self) -> dict[str, Any]:
        """Server options, by SGLang's names."""
        hook = {
            "name": "gate",
            "target_modules": ["model"],
            "hook_factory": "engine_gate:make_hook",
            "config": {
                "closed": str(self._closed),
                "order": str(self._order),
                "bucket_order": str(self._bucket_order),
                "held": str(self._held),
            },
        }
        # The server tells of its load after each pass, for underway().
        return {"forward-hooks": json.dumps([hook]), "load-snapshot-publish-interval": 1}

    @contextlib.contextmanager
    def importable(self) -> Iterator[None]:
        """Inside, a server that is started finds this module."""
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before

    def close(self) -> None:
        """From here on responses go on by five tokens a second."""
        self._closed.touch()

    def open(self) -> None:
        """Responses go on at full speed; without effect when it is open."""
        self._closed.unlink(missing_ok=True)
        self._order.unlink(missing_ok=True)
        self._bucket_order.unlink(missing_ok=True)

    def hold_at(self, number: int) -> None:
        """From here on the ``number``-th forward pass is held until :meth:`open`; the server answers nothing then.

        The first pass of a request computes its first token, each later one the next.
        """
        self._held.unlink(missing_ok=True)
        new = self._order.with_suffix(".new")
        new.write_text(f"{number} {uuid.uuid4().hex}")
        new.rename(self._order)

    def hold_bucket(self, number: int, host: str = "127.0.0.1") -> None:
        """From here on a server holds the ``number``-th bucket of a push until :meth:`open`; it answers nothing then.

        Of a push over a process group.

        Args:
            number: from 1.
            host: what the server listens at.
        """
        self._held.unlink(missing_ok=True)
        self._bucket_order.write_text(f"{number} {host}")

    async def held(self) -> None:
        """Waits until the pass or the bucket is held that was named."""
        end = time.monotonic() + DEADLINE_S
        while not self._held.exists():
            assert time.monotonic() < end, f"the server did not come to the pass after {DEADLINE_S:.0f} s"
            await asyncio.sleep(0.002)


async def underway(url: str, requests: int, key: str = KEY) -> None:
    """Waits until so many requests or more run at the server, each of which has a token at least."""
    import httpx

    end, running = time.monotonic() + DEADLINE_S, 0
    async with httpx.AsyncClient(trust_env=False, timeout=300, headers={"authorization": f"Bearer {key}"}) as http:
        while running < requests:
            assert time.monotonic() < end, f"{running} of {requests} requests run at {url} after {DEADLINE_S:.0f} s"
            await asyncio.sleep(0.02)
            running = (await http.get(f"{url}/v1/loads")).json()["loads"][0]["num_running_reqs"]
