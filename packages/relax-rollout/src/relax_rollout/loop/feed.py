"""Feeds a rollout with groups: what waits in the ledger, then new prompts of the source."""

import logging

from relax_data.prompts.ledger import PromptLedger, PromptState
from relax_data.prompts.source import PromptSource
from relax_data.types import SampleGroup, SampleStatus

logger = logging.getLogger(__name__)


class PromptFeed:
    """Takes groups out of the ledger and, when none waits there, prompts out of the source into the ledger.

    It keeps no prompt itself: what it gave is out in the ledger.

    Attributes:
        source_exhausted: the source gave fewer prompts than it was asked for: it has no more.
    """

    def __init__(
        self, source: PromptSource, ledger: PromptLedger, n_samples: int, *, keep_interrupted: bool = False
    ) -> None:
        """Takes nothing yet.

        Args:
            source: prompts.
            ledger: where groups wait.
            n_samples: responses to a prompt.
            keep_interrupted: unfinished samples keep their tokens.
        """
        self.source_exhausted = False
        self._keep = keep_interrupted
        self._source = source
        self._ledger = ledger
        self._n_samples = n_samples

    def take(self, n: int) -> list[SampleGroup]:
        """Up to ``n`` groups to generate: waiting ones that have tokens, then others, then new prompts.

        They are out from now on. Fewer than ``n`` only when the source has no more.
        """
        taken = sorted(self._ledger.waiting, key=lambda g: g.start_version is None)[:n]
        self._ledger.take_back(g.prompt.prompt_id for g in taken)  # before the source is asked, which may raise
        missing = n - len(taken)
        if missing > 0:
            prompts = self._source.next(missing)
            self.source_exhausted = len(prompts) < missing
            new = [SampleGroup.start(prompt, self._n_samples) for prompt in prompts]
            self._ledger.hand_out(new)
            taken += new
        return taken

    def put_back(self) -> int:
        """Lets all groups that are out wait for the next rollout.

        Samples that an error left half done start again, or go on from the tokens of their finished requests.

        Returns:
            samples whose tokens were thrown away.
        """
        active, restarted = self._ledger.active, 0
        for group in active:
            for sample in group.samples:
                if sample.status.finished:
                    continue
                if self._keep:
                    sample.status, sample.error = SampleStatus.PENDING, None
                else:
                    restarted += bool(sample.tokens)
                    sample.restart()
            group.settle()
        self._ledger.interrupt(g.prompt.prompt_id for g in active)
        return restarted

    def restart_resized(self) -> int:
        """After a load: groups of another size than ``n_samples`` start again, with that many samples.

        Returns:
            samples whose tokens were thrown away.
        """
        resized = [g for g in self._ledger.groups() if len(g.samples) != self._n_samples]
        if not resized:
            return 0
        restarted = sum(bool(s.tokens) for g in resized for s in g.samples)
        logger.warning(
            "the checkpoint buffers %d prompts with %d responses each, --n-samples-per-prompt is %d: they restart",
            len(resized),
            len(resized[0].samples),
            self._n_samples,
        )
        for group in resized:
            group.samples = SampleGroup.start(group.prompt, self._n_samples).samples
            group.settle()
            if self._ledger.state_of(group.prompt.prompt_id) is PromptState.BUFFERED:
                self._ledger.interrupt([group.prompt.prompt_id])
        return restarted

    def restart_unfinished(self) -> int:
        """After a load without partial rollout: samples that a run with it has saved half done start again.

        Returns:
            samples whose tokens were thrown away.
        """
        restarted = 0
        for group in self._ledger.waiting:
            half_done = [s for s in group.samples if s.tokens and not s.status.finished]
            for sample in half_done:
                sample.restart()
            if half_done:
                group.settle()
            restarted += len(half_done)
        if restarted:
            logger.warning(
                "the checkpoint has %d unfinished responses: without --partial-rollout they restart", restarted
            )
        return restarted
