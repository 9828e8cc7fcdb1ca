"""Groups as JSON values: the part of the rollout buffer that goes into a checkpoint."""

from typing import Any

from relax_data.types import Prompt, Sample, SampleGroup, SampleStatus

from relax_rollout.errors import from_plain, to_plain


def group_to_state(group: SampleGroup) -> dict[str, Any]:
    """``group`` with all its tokens; samples that are being generated at this moment as they would restart."""
    prompt = group.prompt

    def plain(field: str) -> Any:
        return to_plain(getattr(prompt, field), f"{prompt.source}: {field}", objects=True)

    return {
        "prompt": {
            "prompt_id": prompt.prompt_id,
            "epoch": prompt.epoch,
            "source": prompt.source,
            "text": prompt.text,
            "input_ids": [int(t) for t in prompt.input_ids],
            "label": plain("label"),
            "messages": plain("messages"),
            "metadata": plain("metadata"),
            "multimodal": plain("multimodal"),
        },
        "samples": [_sample_to_state(s) for s in group.samples],
    }


def group_from_state(state: dict[str, Any]) -> SampleGroup:
    """The group that :func:`group_to_state` wrote."""
    values = dict(state["prompt"])
    for field in ("label", "messages", "metadata", "multimodal"):
        values[field] = from_plain(values[field])
    prompt = Prompt(**values)
    return SampleGroup(prompt, [_sample_from_state(s, prompt) for s in state["samples"]])


def _sample_to_state(sample: Sample) -> dict[str, Any]:
    state: dict[str, Any] = {"index": sample.index, "aborted_count": sample.aborted_count}
    if not sample.status.finished:
        return state | {"status": SampleStatus.PENDING.value}
    return state | {
        "status": sample.status.value,
        "tokens": [int(t) for t in sample.tokens],
        "log_probs": [float(p) for p in sample.log_probs],
        "versions": [int(v) for v in sample.versions],
        "loss_mask": [int(m) for m in sample.loss_mask],
        "response": sample.response,
        "reward": sample.reward,
        "reward_info": to_plain(sample.reward_info, f"{sample.name}: reward_info"),
    }


def _sample_from_state(state: dict[str, Any], prompt: Prompt) -> Sample:
    sample = Sample(prompt, state["index"], aborted_count=state["aborted_count"])
    if "tokens" in state:
        sample.append(state["tokens"], state["log_probs"], state["versions"], loss_mask=state["loss_mask"])
        sample.status = SampleStatus(state["status"])
        sample.response, sample.reward = state["response"], state["reward"]
        sample.reward_info = from_plain(state["reward_info"])
    return sample
