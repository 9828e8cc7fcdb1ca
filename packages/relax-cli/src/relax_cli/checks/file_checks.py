"""Checks of the files and folders that the options name: what is read is whole and fits, what is written can be."""

import contextlib
import dataclasses
import json
import os
import re
from pathlib import Path

from relax_data.errors import DataError
from relax_data.options import flag
from relax_data.prompts.saved_groups import SAMPLES_FILE, read_arrays
from relax_data.readers.files import resolve_files
from relax_data.serialization import check_format
from relax_train.checkpoint import manifest
from relax_train.checkpoint.file_list import MANIFEST
from relax_train.checkpoint.folders import CheckpointError, regular
from relax_train.models.architectures import model_shape, unsupported
from relax_train.settings.checkpoint import LATEST, ROLLOUT_ID
from relax_train.settings.model import read_hf_config

from relax_cli.checks.data_checks import VOCABULARIES, has_tokenizer, resume_problem
from relax_cli.checks.weight_files import weight_problems
from relax_cli.cluster.placement import SIZES
from relax_cli.config.derive import PATHS
from relax_cli.config.run_config import RunConfig
from relax_cli.config.settings import LONGEST_NAME
from relax_cli.run import folder as run_folder

Problems = list[str]

_WRITTEN = (
    "save",
    "save_hf",
    "save_debug_rollout_data",
    "sglang_profile_output_dir",
    "memory_snapshot_dir",
    "wandb_dir",
)
_FIELD = re.compile(r"\{rollout_id:?(0?[1-9]?[0-9]?d?)\}")
_BESIDE_WEIGHTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
_LONGEST_PATH = 3800
"""Bytes of a path: Linux takes 4,095, and the names of what is in a checkpoint stand behind it."""


def file_problems(config: RunConfig) -> Problems:
    """Lists what is wrong with files that are there; missing ones matter to a start alone (:func:`file_needs`)."""
    found = [*_home_problems(config), *_name_problems(config), *_overwriting_problems(config)]
    return [*found, *_weight_problems(config), *_tokenizer_problems(config), *_resume_problems(config)]


def file_needs(config: RunConfig) -> Problems:
    """Files and folders that a run needs and a plan can do without."""
    found = []
    if config.train.checkpoint.load is None and run_folder.holds_a_run(config.run_dir):
        found.append(
            f"another --tb-experiment-name, for example {config.name}-2: {config.run_dir} holds the metrics of an "
            "earlier run; or, to go on with that run, --load and the folder that it had as --save"
        )
    folder = Path(config.train.model.hf_checkpoint)
    if os.path.isfile(folder / "config.json"):
        found += _folder_needs("--hf-checkpoint", folder, tokenizer=True)
    reference = config.train.model.ref_load
    if reference is not None and os.path.isfile(os.path.join(reference, "config.json")):
        found += _folder_needs("--ref-load", Path(reference), tokenizer=False)
    return [*found, *_missing_samples(config), *_unwritable(config)]


def nothing_left(config: RunConfig) -> str | None:
    """Why a start of this run would do nothing: the checkpoint that it goes on from is of its last rollout."""
    checkpoint, length = config.train.checkpoint, config.run.num_rollout
    if checkpoint.load is None or length is None or config.debug.debug_rollout_only:
        return None
    if checkpoint.start_rollout_id is not None:
        return None  # one behind the last is refused
    try:
        found = manifest.find(Path(checkpoint.load))
    except CheckpointError:  # that is said elsewhere
        return None
    if found is None or found[1]["rollout_id"] + 1 < length:
        return None
    return (
        f"{found[0]} holds rollout {found[1]['rollout_id']}, and the last one of --num-rollout {length} is {length - 1}"
    )


def _missing_samples(config: RunConfig) -> Problems:
    """The first file of ``--load-debug-rollout-data`` that is not there; a run would meet it late."""
    template, checkpoint = config.debug.load_debug_rollout_data, config.train.checkpoint
    if template is None or config.debug.problems(config.given):  # what is wrong with it is said elsewhere
        return []
    first = checkpoint.start_rollout_id
    if first is None:
        loaded = None
        with contextlib.suppress(CheckpointError):  # that is said elsewhere
            loaded = manifest.find(Path(checkpoint.load)) if checkpoint.load is not None else None
        first = 0 if loaded is None else loaded[1]["rollout_id"] + 1
    for rollout in range(first, config.run.num_rollout or 0):
        path = _of_rollout(template, rollout)
        if not os.path.isfile(path):
            return [
                f"the samples of rollout {rollout}: there is no file {path} (--load-debug-rollout-data); write it with "
                "--save-debug-rollout-data, or choose the rollouts that were saved (--start-rollout-id, --num-rollout)"
            ]
    return []


def _folder_needs(option: str, folder: Path, *, tokenizer: bool) -> Problems:
    names = os.listdir(folder)
    found = []
    if not any(n.endswith(".safetensors") for n in names):
        found.append(f"{option} {folder} has no weights: it must hold *.safetensors files; download the whole model")
    if tokenizer and not has_tokenizer(str(folder)):
        found.append(
            f"{option} {folder} has no tokenizer: it must hold one of {', '.join(VOCABULARIES)}; download the whole "
            "model, or copy the tokenizer's files from the model that it was made of"
        )
    return found


def _unwritable(config: RunConfig) -> Problems:
    """Folders that this run would have to make and cannot; on a cluster that is joined only the driver's own."""
    checkpoint, samples = config.train.checkpoint, config.debug.save_debug_rollout_data
    wanted = {f"the run directory {config.run_dir} (made where the command is started)": config.run_dir}
    if config.sglang_profile.sglang_profile or config.train_profile.use_pytorch_profiler:
        wanted[f"the folder of traces {config.trace_dir} (made where the command is started)"] = config.trace_dir
    if config.cluster.ray_address is None:
        paths = {"save": checkpoint.save, "save_hf": checkpoint.save_hf, "wandb_dir": config.logging.wandb_dir}
        paths["sglang_profile_output_dir"] = config.sglang_profile.sglang_profile_output_dir
        paths["memory_snapshot_dir"] = config.memory_profile.memory_snapshot_dir
        paths["save_debug_rollout_data"] = os.path.dirname(samples) if samples else None
        wanted |= {f"{flag(name)} {path}": Path(path) for name, path in paths.items() if path}
    found = []
    for what, path in wanted.items():
        there = next(p for p in (path, *path.parents) if os.path.lexists(p))
        if not there.is_dir():
            found.append(f"a place for {what}: {there} is not a folder; choose another path")
        elif not os.access(there, os.W_OK | os.X_OK):
            found.append(f"a place for {what}: this user may not write into {there}; choose another path")
    return found


def _home_problems(config: RunConfig) -> Problems:
    values = {f.name: getattr(part, f.name) for part in config.parts() for f in dataclasses.fields(part)}
    return [
        f"{flag(name)} {values[name]}: there is no user of that name whose home it could be; write the path itself, or "
        f"./{values[name]} for a folder of that name"
        for name in PATHS
        if str(values[name]).startswith("~")
    ]


def _written(config: RunConfig) -> dict[str, str]:
    """The paths that the run writes to, by option."""
    values = {f.name: getattr(part, f.name) for part in config.parts() for f in dataclasses.fields(part)}
    return {name: values[name] for name in _WRITTEN if values[name]}


def _name_problems(config: RunConfig) -> Problems:
    """Names that no file system takes: they would end the run when it first writes, after hours perhaps."""
    found = []
    for name, path in _written(config).items():
        # The largest rollout id, and the ending that a file has until it is whole.
        full = os.fsencode(path.replace(ROLLOUT_ID, "9" * 10))
        longest = max((len(part) + len(b".tmp") for part in full.split(b"/")), default=0)
        if longest > LONGEST_NAME or len(full) > _LONGEST_PATH:
            found.append(
                f"{flag(name)} {path[:60]}...: a name in it is too long: a file system takes at most {LONGEST_NAME} "
                f"bytes a name (4 of them for an ending) and {_LONGEST_PATH} a path; choose a shorter one"
            )
    return found


def _overwriting_problems(config: RunConfig) -> Problems:
    """Lists what the run needs and would itself replace: each export and checkpoint replaces a folder of its name."""
    checkpoint, model, debug = config.train.checkpoint, config.train.model, config.debug
    templates = {"save_hf": checkpoint.save_hf, "save_debug_rollout_data": debug.save_debug_rollout_data}
    templates["save"] = os.path.join(checkpoint.save, f"rollout_{ROLLOUT_ID}") if checkpoint.save else None
    needed = [("--hf-checkpoint", model.hf_checkpoint), ("--ref-load", model.ref_load), ("--save", checkpoint.save)]
    needed += [("--load", checkpoint.load), ("the run directory", str(config.run_dir))]
    for data in (*config.data.prompt_data, *config.eval.eval_prompt_data[1::2]):
        with contextlib.suppress(DataError, OSError):  # that is said elsewhere
            needed += [("prompts", file.path) for file in resolve_files(data) if not file.is_hub]
    found = []
    for name, template in templates.items():
        for what, path in needed:
            rollout = _replaced_by(template, path) if template and path else None
            if rollout is not None and _is_rollout_of(config, rollout):
                found.append(
                    f"{flag(name)} {template}: rollout {rollout} would replace {path} ({what}), which the run needs; "
                    "choose another path"
                )
    return found


def _replaced_by(template: str, path: str) -> int | None:
    """The rollout whose file or folder by ``template`` is ``path`` or holds it; None when none is."""
    template = os.path.realpath(template)
    pattern = re.compile("([0-9]{1,10})".join(map(re.escape, _FIELD.split(template)[::2])))
    target = Path(os.path.realpath(path))
    for folder in map(str, (target, *target.parents)):
        match = pattern.fullmatch(folder)
        if match is not None and pattern.groups:
            rollout = int(match[1])
            if _of_rollout(template, rollout) == folder:
                return rollout
    return None


def _of_rollout(template: str, rollout: int) -> str:
    return _FIELD.sub(lambda field: format(rollout, field[1]), template)


def _is_rollout_of(config: RunConfig, rollout: int) -> bool:
    first, length = config.train.checkpoint.start_rollout_id or 0, config.run.num_rollout
    return first <= rollout and (length is None or rollout < length)


def _weight_problems(config: RunConfig) -> Problems:
    """Weights that are there but damaged, or of another model than the ``config.json`` beside them."""
    model, found = config.train.model, []
    for option, folder in (("--hf-checkpoint", model.hf_checkpoint), ("--ref-load", model.ref_load)):
        if not folder or not os.path.isdir(folder):
            continue
        shape = None
        with contextlib.suppress(ValueError):  # that is said elsewhere
            hf_config = read_hf_config(folder)
            if not hf_config.get("quantization_config"):
                shape = model_shape(hf_config)
            elif not config.debug.debug_rollout_only and not unsupported(hf_config):
                found.append(
                    f"{option}: {folder} is quantised (quantization_config in config.json), which is for generation "
                    "only: use the model in bfloat16 or float32"
                )
        found += [f"{option}: {problem}" for problem in weight_problems(Path(folder), shape)]
    return found


def _tokenizer_problems(config: RunConfig) -> Problems:
    """Small files beside the weights that are damaged: the engine would name none of them, after minutes of loading."""
    found = []
    folder = config.train.model.hf_checkpoint
    for name in _BESIDE_WEIGHTS if folder else ():
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            continue
        try:
            content = Path(path).read_bytes()
            if content.startswith(b"version https://git-lfs"):
                raise ValueError("it is a pointer of Git LFS, not the file itself (git lfs pull)")
            if not isinstance(json.loads(content), dict):
                raise ValueError("it holds no JSON object")
        except (OSError, ValueError, RecursionError) as error:
            found.append(f"--hf-checkpoint: {path} cannot be read ({error}); download it again")
    return found


def _resume_problems(config: RunConfig) -> Problems:
    """A checkpoint of ``--load`` that this run could not go on with."""
    load, model = config.train.checkpoint.load, config.train.model
    if load is None or not os.path.isdir(load) or config.debug.debug_rollout_only:
        return []
    if load != config.train.checkpoint.save and not os.path.isfile(os.path.join(load, LATEST)):
        return []  # the checkpoint's settings say so
    try:
        checkpoint = manifest.find(Path(load))
    except CheckpointError as error:
        return [f"--load: {error}"]
    if checkpoint is None:
        return []
    folder, saved = checkpoint
    parallel = config.train.parallel
    sizes = {name: getattr(parallel, name) for name in SIZES}
    sizes["expert_tensor_parallel_size"] = parallel.resolved_expert_tensor_parallel_size
    found = [manifest.files_problem(folder, saved)]
    if "rollout" not in saved["extra"] and not config.debug.debug_train_only:
        found.append(f"{folder / MANIFEST} does not say which prompts come next. {manifest.way_out(folder)}")
    try:
        rollout = saved["extra"].get("rollout")
        if rollout is not None and not config.debug.debug_train_only:
            found.append(_rollout_problem(rollout, folder, whole=found == [None]))
            found.append(resume_problem(rollout, config))
        found.append(manifest.architecture_problem(saved, read_hf_config(model.hf_checkpoint), folder))
        found.append(manifest.layout_problem(saved, sizes, folder))
        found.append(manifest.optimizer_problem(saved, folder))
        on_gpu = None if config.placement is None else config.placement.device == "cuda"
        if (bf16 := on_gpu if model.bf16 is None else model.bf16) is not None:
            found.append(manifest.precision_problem(saved, "bfloat16" if bf16 else "float32", folder))
    except (TypeError, AttributeError, KeyError):
        found.append(f"{folder / MANIFEST} is damaged. {manifest.way_out(folder)}")
    except ValueError:
        pass  # --hf-checkpoint itself cannot be read, which is said elsewhere
    return [f"--load: {problem}" for problem in found if problem is not None]


def _rollout_problem(rollout: object, folder: Path, *, whole: bool) -> str | None:
    """A state of the prompts that this version does not read, or whose samples are not there.

    Args:
        whole: no file of the checkpoint is known to be damaged, so that one that is would be news.
    """
    try:
        check_format(rollout)
    except ValueError as error:
        return f"{folder}: {error}"
    try:
        if whole:
            read_arrays(regular(folder / SAMPLES_FILE).read_bytes())
    except (OSError, ValueError) as error:
        return f"{folder}: {error}. {manifest.way_out(folder)}"
    return None
