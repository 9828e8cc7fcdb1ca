"""How much of what sleeps may stay on a device beside an engine. Needs no torch: a plan asks before anything runs."""

GIB = 2**30

RESERVE = 0.10
"""Part of the device that is left free beside an engine that has generated once: a later rollout may need more."""
RESERVE_BYTES = 6 * GIB
"""As much as is left free on a large device.

What an engine may need more does not grow with the device: the activations of one chunk of prompts (16,384 tokens of a
70 B model on eight GPUs: under 2 GiB) and three float32 copies of the logits of all sequences that decode at once (512
of a vocabulary of 152 k: 0.9 GiB). Most of it the first rollout has used already, and is no longer free then.
"""
OUTSIDE_BYTES = 6 * GIB
"""About what both processes take beside the weights, the KV cache and what stays: CUDA, graphs, activations."""


def room_beside(free: int, resident: int, total: int) -> int:
    """Bytes that may stay on a device.

    Args:
        free: bytes that are free now, while the engine has all it uses.
        resident: bytes that stay there already.
        total: bytes of the device.
    """
    return max(0, resident + free - reserve(total))


def reserve(total: int) -> int:
    """Bytes of a device of this size that are left free."""
    return min(int(RESERVE * total), RESERVE_BYTES)


def expected_room(total: int, engine_share: float) -> int:
    """About what :func:`room_beside` will find.

    Args:
        total: bytes of the device.
        engine_share: part of it for the engine's weights and KV cache (``--sglang-mem-fraction-static``).
    """
    return room_beside(int((1 - engine_share) * total) - OUTSIDE_BYTES, 0, total)


def share_for(total: int, kept: int) -> float:
    """The largest share of an engine beside which so many bytes stay; below 0 when there is none."""
    return (total - kept - OUTSIDE_BYTES - reserve(total)) / total
