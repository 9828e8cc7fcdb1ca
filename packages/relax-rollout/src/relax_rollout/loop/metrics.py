"""Numbers of one rollout, for the progress line and TensorBoard."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from relax_data.types import Sample, SampleGroup, SampleStatus, WeightVersion

from relax_rollout.staleness import ages
from relax_rollout.timer import PhaseTimer


def sample_metrics(samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """Reward, length in tokens and share of truncated responses, over all samples; nothing for no samples.

    Numbers that the reward function returned beside the reward are averaged under ``<prefix>/info/<key>`` when every
    sample has them.
    """
    if not samples:
        return {}
    rewards = [s.reward for s in samples if s.reward is not None]
    lengths = [len(s.tokens) for s in samples]
    metrics = {
        f"{prefix}/response_length": statistics.fmean(lengths),
        f"{prefix}/response_length_max": float(max(lengths)),
        f"{prefix}/truncated": sum(s.status is SampleStatus.TRUNCATED for s in samples) / len(samples),
    }
    if rewards:
        metrics[f"{prefix}/reward"] = statistics.fmean(rewards)
        metrics[f"{prefix}/reward_std"] = statistics.pstdev(rewards)
    for key in samples[0].reward_info:
        values = [s.reward_info.get(key) for s in samples]
        numbers = [float(v) for v in values if isinstance(v, int | float)]
        if len(numbers) == len(values):
            metrics[f"{prefix}/info/{key}"] = statistics.fmean(numbers)
    return metrics


def staleness_metrics(samples: Sequence[Sample], version: WeightVersion) -> dict[str, float]:
    """How old the tokens are that a training step gets, in versions and as shares; nothing for no samples.

    Args:
        samples: whole ones.
        version: the policy version that consumes them.
    """
    staleness = sorted(ages((s.oldest_version for s in samples), version).elements())
    if not staleness:
        return {}
    tokens = sum(len(s.tokens) for s in samples)
    return {
        "staleness/mean": statistics.fmean(staleness),
        "staleness/max": float(staleness[-1]),
        "staleness/p95": float(staleness[-(-95 * len(staleness) // 100) - 1]),
        "train/off_policy_token_share": sum(v < version for s in samples for v in s.versions) / tokens,
        "train/masked_token_share": sum(not m for s in samples for m in s.loss_mask) / tokens,
        "train/mixed_version_sample_share": sum(len(set(s.versions)) > 1 for s in samples) / len(samples),
        "rollout/interruptions_per_sample": statistics.fmean(s.aborted_count for s in samples),
    }


def sample_histograms(samples: Sequence[Sample], version: WeightVersion) -> dict[str, dict[int, int]]:
    """How often each staleness (versions) and response length (tokens) occurs among the samples of a training step."""
    staleness = ages((s.oldest_version for s in samples), version)
    lengths = Counter(len(s.tokens) for s in samples)
    return {"staleness/samples": dict(staleness), "rollout/response_lengths": dict(lengths)}


def rollout_metrics(
    groups: Sequence[SampleGroup],
    *,
    version: WeightVersion,
    tokens: int,
    dropped: Iterable[str],
    restarted: int,
    prompts: Mapping[str, int],
    timer: PhaseTimer,
) -> dict[str, float]:
    """All metrics of a rollout.

    Args:
        version: the policy version that consumes the groups; staleness is this minus a sample's oldest version.
        tokens: tokens that the engines returned during the rollout, also those thrown away.
        dropped: the reason of each prompt dropped during the rollout.
        restarted: samples whose tokens were thrown away during the rollout, or before it since the last one, to start
            again from the prompt.
        prompts: number of prompts of the run by state (:meth:`relax_data.prompts.ledger.PromptLedger.counts`) when
            the groups are assigned to training.
        timer: the rollout's times.
    """
    samples = [s for g in groups for s in g.samples]
    elapsed = max(timer.elapsed_s, 1e-9)
    metrics = sample_metrics(samples, "rollout")
    metrics |= staleness_metrics(samples, version)
    counts = Counter(dropped)
    buffered = prompts["partial"] + prompts["buffered"]
    metrics |= {f"rollout/dropped/{reason}": float(n) for reason, n in sorted(counts.items())}
    return metrics | {
        "rollout/groups": float(len(groups)),
        "rollout/dropped": float(sum(counts.values())),
        "rollout/restarted_samples": float(restarted),
        "rollout/buffered_groups": float(buffered),
        "prompts/out": float(prompts["out"] + prompts["assigned"]),
        "prompts/buffered": float(buffered),
        "prompts/trained": float(prompts["trained"]),
        "prompts/dropped": float(prompts["dropped"]),
        "rollout/tokens": float(tokens),
        "rollout/tokens_per_second": tokens / elapsed,
        "time/rollout": elapsed,
        "time/generate": timer.generate_s,
        "time/reward": timer.reward_s,
    }
