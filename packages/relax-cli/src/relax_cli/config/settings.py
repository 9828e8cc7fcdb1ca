"""Settings of a whole run: where its processes go, how long it lasts, what it logs, and how to look inside it."""

import dataclasses
import importlib.util
import re
import string
from typing import ClassVar, Literal

from relax_data.options import LARGEST_COUNT, Settings, flag, given_flags, option, url_problem

MODES = {
    "colocate": "generate and train in turn",
    "fully_async": "generate and train at once",
}
"""Each mode of execution by the option that asks for it, in a few words. Exactly one is on: the first one, where no
other is asked for. What carries it out stands in :data:`relax_cli.controllers.modes.CONTROLLERS`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSettings(Settings):
    """GPUs that train, GPUs that generate, and how the two share them."""

    TITLE: ClassVar[str] = "Resources and modes"

    colocate: bool = option(
        True, "Train and generate in turn on the same GPUs, with sleep and wake. On unless --fully-async."
    )
    fully_async: bool = option(
        False, "Train and generate at once, on separate GPUs or, without any, in separate processes."
    )
    max_staleness: int = option(
        1,
        "How many versions older than the policy the oldest token of a consumed sample may be; 0 is on-policy. With "
        "--fully-async and --partial-rollout groups are started, and waited for, so that none becomes older. With "
        "--colocate alone it is about the groups that --over-sampling-batch-size leaves for the next rollout, and what "
        "is older starts again from its prompt.",
        ge=0,
        le=LARGEST_COUNT,
    )
    actor_num_nodes: int = option(
        1,
        "Nodes that train. Without GPUs each of them trains a copy of the model, and has an engine.",
        ge=1,
        le=LARGEST_COUNT,
    )
    actor_num_gpus_per_node: int | None = option(
        None,
        "GPUs that train on each of them; by default all there are, 0 on a machine without GPUs (then CPU).",
        ge=0,
        le=LARGEST_COUNT,
    )
    rollout_num_gpus: int | None = option(
        None,
        "With --fully-async: GPUs that generate, in all; by default one node's, --num-gpus-per-node. "
        "With --colocate the engines use the GPUs that train.",
        ge=1,
        le=LARGEST_COUNT,
    )
    num_gpus_per_node: int = option(8, "GPUs of one node of the cluster.", ge=1, le=LARGEST_COUNT)
    weight_sync: Literal["group", "disk"] | None = option(
        None,
        "With --fully-async, how new weights reach the engines: over a process group for each (group, the default), or "
        "as files in the run directory, which all nodes have to see (disk).",
    )
    ray_address: str | None = option(
        None, "Ray cluster to join, as in `ray start --address`, or `auto`; by default Ray is started on this machine."
    )

    @property
    def mode(self) -> str:
        """The mode that is asked for: a key of :data:`MODES`."""
        asked = {"fully_async": self.fully_async, "colocate": self.colocate}
        assert set(asked) == set(MODES), "every mode is an option"
        return next((name for name in asked if asked[name]), "colocate")

    def _problems(self, given: frozenset[str]) -> list[str]:
        found = []
        asked, others = [flag(name) for name in MODES if getattr(self, name)], [flag(n) for n in MODES][1:]
        if len(asked) > 1:
            found.append(f"{' and '.join(reversed(asked))} exclude each other: remove all but one of them")
        if not asked:
            found.append(f"--no-colocate alone chooses no mode: add {' or '.join(others)}, or remove --no-colocate")
        if not self.fully_async and self.rollout_num_gpus is not None and "rollout_num_gpus" in given:
            found.append(
                "--rollout-num-gpus has no effect with --colocate, where the engines use all GPUs that train: "
                "remove it, or add --fully-async"
            )
        if not self.fully_async and self.weight_sync is not None:
            found.append(
                "--weight-sync has no effect with --colocate, where the engines take the weights out of the trainer's "
                "memory: remove it, or add --fully-async"
            )
        port = re.search(r":([0-9]+)$", self.ray_address or "")
        if port is not None and not 1 <= int(port[1]) <= 65535:
            found.append(f"--ray-address {self.ray_address}: a port lies between 1 and 65535, not {port[1]}")
        on_node = self.actor_num_gpus_per_node
        if on_node is not None and on_node > self.num_gpus_per_node >= 1:
            found.append(
                f"--actor-num-gpus-per-node {on_node} is more than --num-gpus-per-node {self.num_gpus_per_node}: "
                "a node has no more GPUs than that"
            )
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """Length of the run, and what the command does instead of running."""

    TITLE: ClassVar[str] = "Run"

    config: str | None = option(
        None,
        "TOML or YAML file of options, keys in snake_case or kebab-case; ${config_dir} in its strings is its folder. "
        "Defaults < file < environment RELAX_<KEY> < command line.",
        metavar="FILE",
    )
    dry_run: bool = option(False, "Check everything, print the plan and exit.")
    print_config: bool = option(False, "Print the merged options as TOML that --config accepts, and exit.")
    num_rollout: int | None = option(
        None, "Rollouts of the whole run, counted from rollout 0 over all resumes.", ge=1, le=LARGEST_COUNT
    )
    num_epoch: int | None = option(
        None, "Or: passes over the prompt data. Give exactly one of the two.", ge=1, le=LARGEST_COUNT
    )
    eval_interval: int | None = option(
        None, "Evaluate before the first and after every N-th rollout.", ge=1, le=LARGEST_COUNT
    )
    skip_eval_before_train: bool = option(False, "No evaluation before the first rollout.")

    def _problems(self, given: frozenset[str]) -> list[str]:
        found = []
        if self.num_rollout is not None and self.num_epoch is not None:
            found.append(
                f"--num-rollout {self.num_rollout} and --num-epoch {self.num_epoch} both say how long the run is: "
                "give exactly one"
            )
        if self.skip_eval_before_train and self.eval_interval is None:
            found.append(
                "--skip-eval-before-train has no effect without --eval-interval: remove it, or add the interval"
            )
        if self.dry_run and self.print_config:
            found.append("--dry-run and --print-config each print something else: give one of them")
        return found


LONGEST_NAME = 255
"""Bytes of a file or folder name, in UTF-8, that the usual file systems take."""
_WANDB = ("wandb_project", "wandb_team", "wandb_group", "wandb_mode", "wandb_host", "wandb_dir", "wandb_run_id")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingSettings(Settings):
    """Places that the metrics go to."""

    TITLE: ClassVar[str] = "Logging"

    tb_experiment_name: str | None = option(
        None, "Name of the run: runs/NAME and traces/NAME; by default one that the driver makes once."
    )
    use_tensorboard: bool = option(True, "Write TensorBoard scalars to runs/NAME/tensorboard.")
    use_wandb: bool = option(False, "Log to Weights & Biases too (pip install wandb; the key is in WANDB_API_KEY).")
    wandb_project: str | None = option(None, "W&B project; by default relax.")
    wandb_team: str | None = option(None, "W&B team or user.")
    wandb_group: str | None = option(None, "W&B group; by default the name of the run.")
    wandb_mode: Literal["online", "offline", "disabled"] | None = option(None, "W&B mode; by default W&B's own.")
    wandb_host: str | None = option(None, "Address of a W&B server of your own.")
    wandb_dir: str | None = option(None, "Folder of W&B's files; by default the run directory.")
    wandb_run_id: str | None = option(None, "W&B run to go on with.")

    def _problems(self, given: frozenset[str]) -> list[str]:
        found = []
        name = self.tb_experiment_name
        if name is not None and (not name.strip() or name in (".", "..") or any(c in name for c in "/\\\0\n")):
            found.append(f"--tb-experiment-name {name!r} must be a folder name without slashes")
        elif name is not None and len(name.encode()) > LONGEST_NAME:
            found.append(
                f"--tb-experiment-name has {len(name.encode())} bytes: it names folders, which have names of at most "
                f"{LONGEST_NAME} bytes; choose a shorter one"
            )
        if self.wandb_host is not None and (problem := url_problem("wandb_host", self.wandb_host)) is not None:
            found.append(problem)
        idle = [n for n in _WANDB if n in given and getattr(self, n) is not None]
        if idle and not self.use_wandb:
            found.append(f"{given_flags(idle)} without effect: add --use-wandb, or remove it")
        if self.use_wandb and importlib.util.find_spec("wandb") is None:
            found.append("--use-wandb needs the package wandb: pip install wandb")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class DebugSettings(Settings):
    """One half of the loop at a time."""

    TITLE: ClassVar[str] = "Debugging"

    debug_rollout_only: bool = option(False, "Generate and score, never train: no training process is started.")
    debug_train_only: bool = option(
        False, "Train on saved samples, never generate: no engine is started. Needs --load-debug-rollout-data."
    )
    save_debug_rollout_data: str | None = option(
        None, "Write each rollout's samples to this file; the path holds {rollout_id}.", metavar="PATH"
    )
    load_debug_rollout_data: str | None = option(
        None, "Read each rollout's samples from this file; the path holds {rollout_id}.", metavar="PATH"
    )

    def _problems(self, given: frozenset[str]) -> list[str]:
        found = []
        if self.debug_rollout_only and self.debug_train_only:
            found.append("--debug-rollout-only and --debug-train-only exclude each other: remove one of them")
        if self.debug_train_only and self.load_debug_rollout_data is None:
            found.append("--debug-train-only needs samples to train on: add --load-debug-rollout-data PATH")
        if self.load_debug_rollout_data is not None and not self.debug_train_only:
            found.append("--load-debug-rollout-data has no effect without --debug-train-only: add it")
        if self.save_debug_rollout_data is not None and self.debug_train_only:
            found.append("--save-debug-rollout-data has no effect with --debug-train-only, where nothing is generated")
        for name in ("save_debug_rollout_data", "load_debug_rollout_data"):
            path = getattr(self, name)
            if path is not None and (problem := _template_problem(path)) is not None:
                found.append(f"{flag(name)} {path!r} {problem}; write for example samples_{{rollout_id}}.jsonl")
        return found


_WIDTH = re.compile(r"(?:0?[1-9][0-9]?)?d?")


def _template_problem(path: str) -> str | None:
    """Why ``path`` is no path with ``{rollout_id}`` or, with leading zeros, ``{rollout_id:04d}``; None when it is."""
    try:
        fields = [part[1:] for part in string.Formatter().parse(path) if part[1] is not None]
    except ValueError as error:
        return f"is no path with {{rollout_id}}: {error}"
    for name, width, conversion in fields:
        if name != "rollout_id" or conversion or not _WIDTH.fullmatch(width or ""):
            return "may hold {rollout_id} or {rollout_id:04d} in braces, and nothing else"
    return None if fields else "must hold {rollout_id}, so that each rollout has a file of its own"


SETTINGS: tuple[type, ...] = (RunSettings, ClusterSettings, LoggingSettings, DebugSettings)
