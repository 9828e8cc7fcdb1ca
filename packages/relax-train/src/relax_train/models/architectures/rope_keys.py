"""The keys of a ``config.json`` that describe the rotary embedding, in the forms of transformers 5 and before.

SGLang reads the same keys with rules of its own. What the two would compute differently is refused here, by name.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, get_args

from relax_train.models.rope import Rope, RopeKind, yarn_attention_factor
from relax_train.models.shape import Config

_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("truncate", "mscale", "mscale_all_dim", "attention_factor"),
    ),
}
"""What each type reads beside its name and ``rope_theta``."""
ROPE_TYPES: tuple[str, ...] = get_args(RopeKind)


def positive(key: str, value: Any) -> float:
    """A number above 0.

    Raises:
        ValueError: it is something else.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 < value < 1e15):
        raise ValueError(f"config.json: {key} should be a number above 0, not {str(value)[:40]!r}")
    return float(value)


def rope_of(config: Config) -> Any:
    """The object that holds the keys; empty when there is none."""
    # As transformers 5 does: a rope_scaling that was added by hand takes the place of rope_parameters.
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def rope_theta(config: Config) -> float:
    """Base of the rotary embedding, from ``rope_parameters`` (transformers 5) or ``rope_theta`` (before).

    Args:
        config: with the defaults of its family.

    Raises:
        ValueError: it is no number above 0, or neither is there.
    """
    theta = rope_of(config).get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json: neither rope_parameters.rope_theta nor rope_theta is there; add one of them")
    return positive("rope_theta", theta)


def rope_problems(config: Config, types: Collection[str]) -> list[str]:
    """Lists what the keys ask for that is not built, each with its key and what to do.

    Args:
        types: the ways of scaling that the family may use.
    """
    rope, found = rope_of(config), []
    if rope and config.get("rope_parameters") not in (None, {}, rope):
        return [
            "rope_parameters and rope_scaling are both there and differ, and SGLang would take the second alone; "
            "remove one of them"
        ]
    if not isinstance(rope, Mapping):
        return [f"rope_parameters should be an object, not {str(rope)[:40]!r}"]
    kind = _type(rope)
    if kind not in types:
        return [
            f"rope type {kind!r} is not supported, only {', '.join(types)}; remove it to train at the model's native "
            "context length"
        ]
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_KEYS[kind]}
    found += [
        f"{key} of rope type {kind!r} is not supported; use a model without it"
        for key, value in rope.items()
        if key not in known and value is not None
    ]
    for part in (config.get("partial_rotary_factor"), rope.get("partial_rotary_factor")):
        if part not in (None, 1):
            found.append(f"partial_rotary_factor {part!r} is not supported; only whole heads are rotated")
    return found


def read_rope(config: Config) -> Rope:
    """The rotary embedding that a configuration without :func:`rope_problems` describes.

    Args:
        config: with the defaults of its family.

    Raises:
        ValueError: a value is missing, no number, or one that SGLang and transformers read differently.
    """
    rope, theta = rope_of(config), rope_theta(config)
    kind: RopeKind = _type(rope)
    if kind == "default":
        return Rope(theta=theta)
    factor = _number(rope, kind, "factor")
    if factor < 1:
        raise ValueError(f"config.json: factor {factor} of rope type {kind!r} should be at least 1")
    if kind == "linear":
        if not isinstance(rope["factor"], float):  # SGLang takes a whole number for a list
            raise ValueError(
                f"config.json: SGLang stops at factor {rope['factor']!r} of rope type 'linear': write {factor}"
            )
        return Rope(theta=theta, kind=kind, factor=factor)
    original = _original_positions(config, rope)
    if kind == "llama3":
        low, high = (_number(rope, kind, key) for key in ("low_freq_factor", "high_freq_factor"))
        if low >= high:
            raise ValueError(f"config.json: low_freq_factor {low} should be below high_freq_factor {high}")
        return Rope(
            theta=theta,
            kind=kind,
            factor=factor,
            original_positions=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return _yarn(config, rope, Rope(theta=theta, kind=kind, factor=factor, original_positions=original))


def longest_text(config: Config, rope: Rope) -> int | None:
    """Positions that the model was made for, as SGLang counts them; None when ``config.json`` does not say.

    ``max_position_embeddings`` is the stretched length but for ``linear``, where it is the length before.
    """
    positions = config.get("max_position_embeddings")
    if not positions:
        return None
    return int(positions * rope.factor) if rope.kind == "linear" else int(positions)


def _yarn(config: Config, rope: Config, common: Rope) -> Rope:
    factor, original = common.factor, common.original_positions
    fast, slow = (_number(rope, "yarn", key, default) for key, default in (("beta_fast", 32), ("beta_slow", 1)))
    if slow >= fast:
        raise ValueError(f"config.json: beta_slow {slow} should be below beta_fast {fast}")
    if common.theta <= 1:
        raise ValueError(f"config.json: rope_theta {common.theta} of rope type 'yarn' should be above 1")
    stretched = int(original * factor)
    if (config.get("max_position_embeddings") or 0) > stretched:
        raise ValueError(
            f"config.json: max_position_embeddings {config['max_position_embeddings']} is more than factor {factor:g} "
            f"times original_max_position_embeddings {original}, beyond which SGLang does not scale: lower it to "
            f"{stretched}, or raise the factor"
        )
    scales = [rope.get(key) for key in ("mscale", "mscale_all_dim")]
    if None in scales:
        attention = yarn_attention_factor(factor)
    else:
        top, bottom = (yarn_attention_factor(factor, positive("mscale", scale)) for scale in scales)
        attention = top / bottom
    given = rope.get("attention_factor")
    if given is not None and not math.isclose(positive("attention_factor", given), attention, rel_tol=1e-6):
        raise ValueError(
            f"config.json: SGLang ignores attention_factor {given} and computes {attention:.6g} from the factor; "
            "remove it"
        )
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ValueError(f"config.json: truncate should be true or false, not {str(truncate)[:40]!r}")
    return dataclasses.replace(common, beta_fast=fast, beta_slow=slow, truncate=truncate, attention_factor=attention)


def _type(rope: Config) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _number(rope: Config, kind: str, key: str, default: float | None = None) -> float:
    value = rope.get(key, default)
    if value is None:
        raise ValueError(f"config.json: rope type {kind!r} needs {key}, a number above 0")
    return positive(key, value)


def _original_positions(config: Config, rope: Config) -> int:
    """Length before the scaling: in the rope object, or else the model's, as transformers has it."""
    key = "original_max_position_embeddings"
    value = rope.get(key)
    if value is None:
        value = config.get("max_position_embeddings")
    if config.get(key) not in (None, value):  # of which some models of SGLang take one, some the other
        raise ValueError(f"config.json: {key} stands outside rope_scaling: write it into rope_scaling, or remove it")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 10**9:
        raise ValueError(f"config.json: {key} should be a whole number above 0, not {str(value)[:40]!r}")
    return value
