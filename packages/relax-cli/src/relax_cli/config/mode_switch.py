"""A mode that is asked for where it counts more, as on the command line, takes the place of that of a file.

A file of one mode would else have to be edited for the other: it asks for its mode, and options that have an effect in
that mode alone are refused without it.
"""

from collections.abc import Sequence

from relax_data.options import flag

from relax_cli.config.command_line import Given, Layer
from relax_cli.config.schema import UNSET
from relax_cli.config.settings import MODES

ONLY_IN = {
    "fully_async": (
        "max_staleness",
        "rollout_num_gpus",
        "weight_sync",
        "num_data_storage_units",
        "recompute_kv_cache_after_weight_updates",
    )
}
"""Options without effect in any other mode; ``max_staleness`` has one wherever samples may stay over a step."""
_OF_SURPLUS = ("over_sampling_batch_size", "partial_rollout", "rollout_function_path")


def switch_mode(layers: Sequence[Layer], merged: dict[str, Given]) -> list[str]:
    """Takes a mode out of ``merged`` that a stronger layer replaces, with what has an effect in that mode alone.

    Args:
        layers: weakest first.
        merged: what they give together; changed.

    Returns:
        a warning that names what was left out; none where no mode was replaced.
    """
    for i in reversed(range(1, len(layers))):
        given = {name: item for name, item in layers[i].values.items() if name in MODES}
        weaker: dict[str, Given] = {}
        for layer in layers[:i]:
            weaker |= layer.values
        asked = [name for name, item in given.items() if item.value is True]
        if len(asked) > 1:
            return []  # that is refused
        on = [name for name in MODES if name in weaker and weaker[name].value is True]
        replaced = [name for name in on if (given[name].value is False if name in given else asked)]
        if replaced:
            surplus = any(merged[n].value not in (None, False, UNSET) for n in _OF_SURPLUS if n in merged)
            idle = [
                name
                for mode in replaced
                for name in ONLY_IN.get(mode, ())
                if name in weaker and merged[name] is weaker[name] and not (name == "max_staleness" and surplus)
            ]
            for name in (*replaced, *idle):
                if merged[name] is weaker[name]:
                    del merged[name]
            return [_told(asked[0] if asked else replaced[0], given, replaced, idle, weaker)]
    return []


def _told(
    by: str, given: dict[str, Given], replaced: Sequence[str], idle: Sequence[str], weaker: dict[str, Given]
) -> str:
    def placed(names: Sequence[str]) -> str:
        return ", ".join(f"{flag(name)} ({weaker[name].origin})" for name in names)

    written = flag(by) if given[by].value else flag(f"no_{by}")
    told = f"{written} ({given[by].origin}) takes the place of {placed(replaced)}"
    return told + (f"; left out with it, because without effect then: {placed(idle)}" if idle else "")
