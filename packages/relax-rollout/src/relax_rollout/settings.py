"""Options of the rollout: sampling, over-sampling, rewards, evaluation, engines. Imports no torch."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

from relax_data.hooks import hook_problem
from relax_data.options import LARGEST_COEFFICIENT, LARGEST_COUNT, Settings, flag, functions_help, option, url_problem

from relax_rollout.engines.sglang.settings import SGLangSettings
from relax_rollout.rewards.registry import REWARDS

if TYPE_CHECKING:
    RewardType = str
else:
    RewardType = Literal[tuple(REWARDS)]  # the choices of --rm-type

EQUAL_REWARDS_FILTER = "relax_rollout.filters:reward_nonzero_std"
"""The shipped filter for ``--dynamic-sampling-filter-path``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutSettings(Settings):
    """Size of a rollout in prompts and responses, and how these are sampled."""

    TITLE: ClassVar[str] = "Rollout"

    rollout_batch_size: int = option(
        32, "Prompts a rollout returns, each with --n-samples-per-prompt responses.", ge=1, le=LARGEST_COUNT
    )
    n_samples_per_prompt: int = option(
        1, "Responses sampled for each prompt; together they form a group.", ge=1, le=LARGEST_COUNT
    )
    over_sampling_batch_size: int | None = option(
        None,
        "Prompts open at once: their groups run, are interrupted, or are whole and not trained yet. A rollout ends "
        "when --rollout-batch-size groups are whole and have passed the filter; the others wait for the next one. With "
        "--partial-rollout and --fully-async at most --rollout-batch-size x (--max-staleness + 1). Default: that with "
        "--fully-async, else --rollout-batch-size.",
        le=LARGEST_COUNT,
    )
    rollout_max_response_len: int = option(1024, "Most tokens of a response.", ge=1, le=LARGEST_COUNT)
    rollout_max_context_len: int | None = option(
        None,
        "Most tokens of prompt and response together; a prompt that leaves no room is dropped and counted.",
        ge=2,
        le=LARGEST_COUNT,
    )
    rollout_temperature: float = option(1.0, "Sampling temperature; 0 is greedy.", ge=0, le=LARGEST_COEFFICIENT)
    rollout_top_p: float = option(
        1.0, "Sample from the smallest set of tokens with this probability in sum; 1 is all.", gt=0, le=1
    )
    rollout_top_k: int = option(
        -1, "Sample from this many likeliest tokens; -1 is all.", ge=1, le=LARGEST_COUNT, one_of=(-1,)
    )
    rollout_stop: tuple[str, ...] = option((), "Strings that end a response.")
    rollout_stop_token_ids: tuple[int, ...] = option(
        (), "Token ids that end a response, besides end-of-sequence.", ge=0, le=LARGEST_COUNT
    )
    dynamic_sampling_filter_path: str | None = option(
        None,
        "module:function(group) -> bool or (bool, reason): False drops the group and another prompt takes its place. "
        f"Shipped: {EQUAL_REWARDS_FILTER} drops groups whose rewards are all equal.",
        metavar="MODULE:FUNCTION",
    )
    rollout_function_path: str | None = option(
        None,
        "async module:function(rollout) -> list of groups, in place of the collection with over-sampling.",
        metavar="MODULE:FUNCTION",
    )
    custom_generate_function_path: str | None = option(
        None,
        "async module:function(sample, context) in place of one request for each sample (several turns, tools).",
        metavar="MODULE:FUNCTION",
    )
    partial_rollout: bool = option(
        False,
        "Interrupted samples keep their tokens, log-probs and versions, and the next rollout asks for the rest of the "
        "response only, before it starts new prompts. Without it they start again from the prompt. Needs an "
        "--over-sampling-batch-size above --rollout-batch-size; on by itself with --fully-async.",
    )
    partial_rollout_max_aborted_count: int | None = option(
        None,
        "With --partial-rollout: a sample that was interrupted this often, once or more, is not interrupted again: it "
        "is waited for. Default: no limit.",
        le=LARGEST_COUNT,
    )
    mask_offpolicy_in_partial_rollout: bool = option(
        False,
        "With --partial-rollout: do not train on a token whose weights are older than those that were current when "
        "its sample was finished.",
    )
    recompute_kv_cache_after_weight_updates: bool = option(
        True,
        "With --fully-async: a response that new weights interrupt goes on from keys and values that these have "
        "computed again. With --no-recompute-kv-cache-after-weight-updates it goes on from those that it has, which is "
        "faster, the more so the longer responses are; its log-probs are then those of a mixture, and --use-tis "
        "corrects by exactly these.",
    )

    @property
    def submitted_prompts(self) -> int:
        """Prompts submitted at once at the start of a rollout."""
        return self.over_sampling_batch_size or self.rollout_batch_size

    def _problems(self, given: frozenset[str]) -> list[str]:
        problems = []
        over = self.over_sampling_batch_size
        if over is not None and over < self.rollout_batch_size:
            problems.append(
                f"--over-sampling-batch-size {over} is less than --rollout-batch-size {self.rollout_batch_size}: "
                f"a rollout could never be filled; set it to {self.rollout_batch_size} or more, or leave it out"
            )
        most = self.partial_rollout_max_aborted_count
        if most is not None and most < 1:
            problems.append(
                f"--partial-rollout-max-aborted-count must be 1 or more, not {most}: no sample would ever be "
                "interrupted; for that, remove --partial-rollout and --over-sampling-batch-size"
            )
        if "" in self.rollout_stop:
            problems.append("--rollout-stop holds an empty string, which would end every response; remove it")
        for name in ("dynamic_sampling_filter_path", "rollout_function_path", "custom_generate_function_path"):
            path = getattr(self, name)
            problem = None if path is None else hook_problem(flag(name), path)
            problems += [problem] if problem else []
        return problems + self._without_effect(given)

    def _without_effect(self, given: frozenset[str]) -> list[str]:
        problems = []
        if not self.partial_rollout:
            for name in ("partial_rollout_max_aborted_count", "mask_offpolicy_in_partial_rollout"):
                if name in given and getattr(self, name) not in (None, False):
                    problems.append(f"{flag(name)} has no effect without --partial-rollout; add that or remove it")
        if self.rollout_temperature == 0:
            for name, neutral in (("rollout_top_p", 1.0), ("rollout_top_k", -1)):
                if name in given and getattr(self, name) != neutral:
                    problems.append(f"{flag(name)} has no effect with --rollout-temperature 0 (greedy); remove it")
        if self.rollout_function_path is not None:
            for name in ("over_sampling_batch_size", "dynamic_sampling_filter_path"):
                if name in given and getattr(self, name) is not None:
                    problems.append(
                        f"{flag(name)} has no effect with --rollout-function-path, which collects the groups itself; "
                        "remove one of the two"
                    )
        if self.dynamic_sampling_filter_path == EQUAL_REWARDS_FILTER and self.n_samples_per_prompt == 1:
            problems.append(
                f"--dynamic-sampling-filter-path {EQUAL_REWARDS_FILTER} drops every group when --n-samples-per-prompt "
                "is 1; set --n-samples-per-prompt to 2 or more, or remove the filter"
            )
        return problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardSettings(Settings):
    """The reward, which scores a response: exactly one of ``--rm-type``, ``--custom-rm-path``, ``--rm-url``."""

    TITLE: ClassVar[str] = "Reward"

    rm_type: RewardType | None = option(None, functions_help(REWARDS))  # noqa: RUF009 (option makes a field)
    custom_rm_path: str | None = option(
        None,
        "module:function(sample) -> float or dict, plain or async; with --group-rm it gets the list of the samples of "
        "a group and returns a list.",
        metavar="MODULE:FUNCTION",
    )
    rm_url: str | None = option(
        None, "URL that each sample is POSTed to as JSON; it answers with a number or an object (see --reward-key)."
    )
    reward_key: str | None = option(
        None, "Which entry of a reward that is a dict is the reward to train on; the others go into the metrics."
    )
    group_rm: bool = option(False, "Score all samples of a group in one call.")
    reward_max_concurrency: int = option(
        64,
        "Most reward calls at the same time. With --rm-type math: most worker processes.",
        ge=1,
        le=LARGEST_COUNT,
    )

    @property
    def configured(self) -> bool:
        """Whether the user chose a reward."""
        return any(v is not None for v in (self.rm_type, self.custom_rm_path, self.rm_url))

    def _problems(self, given: frozenset[str]) -> list[str]:
        # That no reward was chosen is none of them: a run that trains on stored rollouts needs none.
        problems = []
        chosen = [flag(n) for n in ("rm_type", "custom_rm_path", "rm_url") if getattr(self, n) is not None]
        if len(chosen) > 1:
            problems.append(f"{' and '.join(chosen)} exclude each other: each of them is the whole reward; keep one")
        if self.custom_rm_path is not None:
            problem = hook_problem("--custom-rm-path", self.custom_rm_path)
            problems += [problem] if problem else []
        if self.rm_url is not None and (problem := url_problem("rm_url", self.rm_url)) is not None:
            problems.append(problem)
        if self.custom_rm_path is None and self.rm_url is None:
            for name in ("reward_key", "group_rm"):
                if name in given and getattr(self, name):
                    problems.append(
                        f"{flag(name)} has no effect without --custom-rm-path or --rm-url; remove it or choose one"
                    )
            if "reward_max_concurrency" in given and self.rm_type == "exact-match":
                problems.append("--reward-max-concurrency has no effect with --rm-type exact-match; remove it")
        return problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSettings(Settings):
    """Prompts of the evaluation, and how responses to them are sampled."""

    TITLE: ClassVar[str] = "Evaluation"

    eval_prompt_data: tuple[str, ...] = option(
        (), "Pairs of a name and the prompts of an evaluation: NAME PATH NAME PATH ...", metavar="NAME PATH"
    )
    n_samples_per_eval_prompt: int = option(
        1, "Responses to each prompt; with more than one, pass@k is measured.", ge=1, le=LARGEST_COUNT
    )
    eval_temperature: float | None = option(
        None, "Sampling temperature; 0 is greedy. Default: --rollout-temperature.", ge=0, le=LARGEST_COEFFICIENT
    )
    eval_top_p: float | None = option(None, "Default: --rollout-top-p.", gt=0, le=1)
    eval_max_response_len: int | None = option(
        None, "Most tokens of a response. Default: --rollout-max-response-len.", ge=1, le=LARGEST_COUNT
    )

    @property
    def datasets(self) -> dict[str, str]:
        """Path by name of the evaluation, in the order given."""
        return dict(zip(self.eval_prompt_data[::2], self.eval_prompt_data[1::2], strict=True))

    def _problems(self, given: frozenset[str]) -> list[str]:
        problems = []
        names = self.eval_prompt_data[::2]
        if len(self.eval_prompt_data) % 2:
            problems.append(
                f"--eval-prompt-data takes pairs of a name and a path, but has {len(self.eval_prompt_data)} values; "
                "write for example --eval-prompt-data aime data/aime.jsonl"
            )
        for name in sorted({n for n in names if names.count(n) > 1}):
            problems.append(f"--eval-prompt-data has the name {name!r} twice; give each evaluation its own name")
        for name in names:
            if not name or "/" in name:
                problems.append(f"--eval-prompt-data: {name!r} cannot be a name; write NAME PATH, the name without '/'")
        if not self.eval_prompt_data:
            for field in ("n_samples_per_eval_prompt", "eval_temperature", "eval_top_p", "eval_max_response_len"):
                if field in given:
                    problems.append(f"{flag(field)} has no effect without --eval-prompt-data; add that or remove it")
        elif self.eval_temperature == 0 and "eval_top_p" in given and self.eval_top_p not in (None, 1.0):
            problems.append("--eval-top-p has no effect with --eval-temperature 0 (greedy); remove it")
        return problems


SETTINGS: tuple[type, ...] = (RolloutSettings, RewardSettings, EvalSettings, SGLangSettings)
