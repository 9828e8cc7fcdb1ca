"""``--rm-url``: a reward behind HTTP.

Each sample is POSTed as JSON ``{"prompt", "messages", "response", "label", "metadata"}``; with ``--group-rm`` a group
as ``{"samples": [...]}``. The answer is a JSON number or an object (with ``--reward-key``), for a group a list of them.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
from relax_data.types import Sample

from relax_rollout.concurrency import LoopLocal
from relax_rollout.errors import to_plain
from relax_rollout.rewards.base import Reward

ATTEMPTS = 4
"""Calls in all when the server cannot be reached, is overloaded (429) or fails (5xx)."""
REQUEST_TIMEOUT_S = 120.0
FIRST_WAIT_S = 0.5
"""Wait before the second call; doubled before each further one."""


class RemoteReward(Reward):
    """Asks a server for the reward; transient failures are repeated."""

    def __init__(self, url: str, *, max_concurrency: int, reward_key: str | None, per_group: bool) -> None:
        super().__init__(f"--rm-url {url}", max_concurrency=max_concurrency, reward_key=reward_key, per_group=per_group)
        self._url = url
        limits = httpx.Limits(max_connections=max_concurrency)
        self._client = LoopLocal(lambda: httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=limits))

    async def score(self, samples: list[Sample]) -> Sequence[Any]:
        """Posts the samples and returns what the server answers."""
        rows = [_row(s) for s in samples]
        answer = await self._post({"samples": rows} if self.per_group else rows[0])
        return answer if self.per_group else [answer]

    async def _post(self, body: dict[str, Any]) -> Any:
        wait = FIRST_WAIT_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                response = await self._client.get().post(self._url, json=body)
                if response.status_code == 429 or response.status_code >= 500:
                    response.raise_for_status()
                break
            except (httpx.TransportError, httpx.HTTPStatusError) as e:
                if attempt == ATTEMPTS:
                    raise RuntimeError(f"no answer in {ATTEMPTS} attempts, last: {type(e).__name__}: {e}") from e
                await asyncio.sleep(wait)
                wait *= 2
        response.raise_for_status()
        try:
            return response.json()
        except ValueError as e:
            raise RuntimeError(f"the answer is no JSON: {response.text[:200]!r}") from e

    async def close(self) -> None:
        """Closes the connections."""
        client = self._client.take()
        if client is not None:
            await client.aclose()


def _row(sample: Sample) -> dict[str, Any]:
    prompt = sample.prompt
    return {
        "prompt": prompt.text,
        "messages": to_plain(prompt.messages, f"{prompt.source}: messages"),
        "response": sample.response,
        "label": to_plain(prompt.label, f"{prompt.source}: label"),
        "metadata": to_plain(prompt.metadata, f"{prompt.source}: metadata"),
    }
