"""A run's options as a file for ``--config``."""

import dataclasses
import re
from typing import Any

from relax_cli.checks.lengths import context_lengths
from relax_cli.config import files, options
from relax_cli.config.run_config import RunConfig

_ONLY_THIS_COMMAND = ("config", "dry_run", "print_config")
"""Options that :func:`to_toml` leaves out: they say what this command does, not what the run is."""


def to_toml(config: RunConfig) -> str:
    """The options of a run as TOML for ``--config``: those that were given, and all others as comments.

    Reading the text back gives the same settings and the same ``given``.
    """
    namespace = options.namespace()
    lines = [
        "# Options of `relax train`. A comment shows a default, or what was derived from other options.",
        '# "none" is what nobody set; where something follows from that at the start, it stands behind.',
    ]
    for part in config.parts():
        lines += ["", f"# {type(part).TITLE}"]
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if field.name == "sglang_extra":
                lines += [f"sglang_{k} = {files.to_toml(v)}" for k, v in sorted(value.items())]
            elif field.name in namespace.options and field.name not in _ONLY_THIS_COMMAND:
                line = f"{field.name} = {files.to_toml(value)}"
                how = _derivation(config, field) if value is None else ""
                lines.append(line if field.name in config.given else f"# {line}{how}")
    return "\n".join(lines) + "\n"


_DEFAULT = re.compile(r"\b(?:[Dd]efault:?|by default) (.+?)(?:[.;](?= )|\.?$)")


def _derivation(config: RunConfig, field: dataclasses.Field[Any]) -> str:
    """Says what an option that is not set becomes at the start, as its help says; empty when it stays unset."""
    if field.name == "rollout_max_context_len" and (longest := context_lengths(config).trained) is not None:
        return f"  # here {longest} tokens, from the model and --max-tokens-per-gpu"
    found = _DEFAULT.search(field.metadata["help"])
    return f"  # by default {found[1]}" if found else ""
