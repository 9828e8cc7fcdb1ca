"""The prompts that the loop has taken from the source and not yet returned. Nothing here is ever lost."""

import bisect
import logging
from typing import Any

from relax_data.prompts.source import PromptSource
from relax_data.types import SampleGroup

from relax_rollout.loop.serialization import group_from_state, group_to_state

logger = logging.getLogger(__name__)


class PromptBuffer:
    """Prompts in three places, each in the order of the prompts; whatever is here comes before what the source has.

    - *ready*: groups that are whole, scored and accepted by the filter: surplus of an earlier rollout.
    - *waiting*: groups of which samples are still to be generated (or generated again).
    - *active*: handed to a rollout that runs.
    """

    def __init__(self, source: PromptSource, n_samples: int) -> None:
        self._source = source
        self._n_samples = n_samples
        self._ready: list[SampleGroup] = []
        self._waiting: list[SampleGroup] = []
        self._active: dict[int, SampleGroup] = {}
        self._accepted: set[int] = set()
        self.source_exhausted = False

    def __len__(self) -> int:
        """Groups that are ready or waiting."""
        return len(self._ready) + len(self._waiting)

    @property
    def ready(self) -> list[SampleGroup]:
        return list(self._ready)

    @property
    def waiting(self) -> list[SampleGroup]:
        return list(self._waiting)

    def take_ready(self, n: int) -> list[SampleGroup]:
        """Up to ``n`` ready groups; they become active and accepted."""
        taken, self._ready = self._ready[:n], self._ready[n:]
        for group in taken:
            self._activate(group)
            self._accepted.add(group.prompt.prompt_id)
        return taken

    def take(self, n: int) -> list[SampleGroup]:
        """Up to ``n`` groups to generate: waiting ones, then new prompts; they become active.

        Fewer than ``n`` only when the source has no more.
        """
        taken, self._waiting = self._waiting[:n], self._waiting[n:]
        for group in taken:  # before the source is asked, which may raise
            self._activate(group)
        missing = n - len(taken)
        if missing > 0:
            prompts = self._source.next(missing)
            self.source_exhausted = len(prompts) < missing
            for prompt in prompts:
                taken.append(SampleGroup.start(prompt, self._n_samples))
                self._activate(taken[-1])
        return taken

    def accept(self, group: SampleGroup) -> None:
        """Notes that an active group is whole, scored and passed the filter."""
        assert group.prompt.prompt_id in self._active, "only an active group is accepted"
        self._accepted.add(group.prompt.prompt_id)

    def release(self, group: SampleGroup) -> None:
        """Forgets an active group: it was returned to the caller, or dropped and counted."""
        del self._active[group.prompt.prompt_id]
        self._accepted.discard(group.prompt.prompt_id)

    def put_back(self, group: SampleGroup) -> None:
        """Keeps an active group for the next rollout: among the ready ones if it was accepted, else waiting."""
        prompt_id = group.prompt.prompt_id
        accepted = prompt_id in self._accepted
        self.release(group)
        bisect.insort(self._ready if accepted else self._waiting, group, key=_prompt_id)

    def put_back_active(self) -> None:
        """Keeps all active groups for the next rollout; a sample that an error left half done starts again."""
        for group in list(self._active.values()):
            for sample in group.samples:
                if not sample.status.finished:
                    sample.restart()
            self.put_back(group)

    def wait(self, group: SampleGroup) -> None:
        """Moves a group to the waiting ones if it is ready, because a sample of it starts again."""
        ready = [g for g in self._ready if g is not group]
        if len(ready) < len(self._ready):
            self._ready = ready
            bisect.insort(self._waiting, group, key=_prompt_id)

    def is_active(self, group: SampleGroup) -> bool:
        """True when this very group was taken and is neither returned nor put back."""
        return self._active.get(group.prompt.prompt_id) is group

    def _activate(self, group: SampleGroup) -> None:
        prompt_id = group.prompt.prompt_id
        if prompt_id in self._active:
            raise ValueError(
                f"{group.prompt.source}: the prompt source gave id {prompt_id} twice; ids number the prompts "
                "of the whole run"
            )
        self._active[prompt_id] = group

    def state_dict(self) -> dict[str, Any]:
        """Cursor and groups as JSON values; active groups as if the rollout that has them were interrupted now."""
        active = self._active.values()
        ready = [*self._ready, *(g for g in active if g.prompt.prompt_id in self._accepted)]
        waiting = [*self._waiting, *(g for g in active if g.prompt.prompt_id not in self._accepted)]
        return {
            "source": self._source.state_dict(),
            "ready": [group_to_state(g) for g in sorted(ready, key=_prompt_id)],
            "waiting": [group_to_state(g) for g in sorted(waiting, key=_prompt_id)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what :meth:`state_dict` wrote; groups of another size start again with ``n_samples``."""
        self._source.load_state_dict(state["source"])
        self._ready = [group_from_state(g) for g in state["ready"]]
        self._waiting = [group_from_state(g) for g in state["waiting"]]
        self._active, self._accepted = {}, set()
        self.source_exhausted = False
        resized = [g for g in (*self._ready, *self._waiting) if len(g.samples) != self._n_samples]
        if resized:
            logger.warning(
                "the checkpoint buffers %d prompts with %d responses each, --n-samples-per-prompt is %d: they restart",
                len(resized),
                len(resized[0].samples),
                self._n_samples,
            )
            fresh = [SampleGroup.start(g.prompt, self._n_samples) for g in resized]
            self._ready = [g for g in self._ready if len(g.samples) == self._n_samples]
            self._waiting = [g for g in self._waiting if len(g.samples) == self._n_samples] + fresh
            self._waiting.sort(key=_prompt_id)


def _prompt_id(group: SampleGroup) -> int:
    return group.prompt.prompt_id
