"""The recipes of ``docs/extending.md``, taken from the page, put into a copy of the packages, and used there.

What uses them runs in a process of its own that imports the copy: this file as a script, with the name of a check.
"""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "extending.md"
MOST_FILES = 3


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code of the page: a new file (``python``), or changes of one (``diff``)."""

    kind: str
    path: str
    text: str

    def put_into(self, root: Path) -> None:
        """Carries the block out on the files below ``root``."""
        file = root / self.path
        if self.kind == "python":
            assert not file.exists(), f"{self.path} is there already: the page shows it as a new file"
            file.write_text(self.text, encoding="utf-8")
            return
        content = file.read_text(encoding="utf-8")
        for hunk in self.text.split("@@\n"):
            lines = [line or " " for line in hunk.splitlines()]
            assert {line[0] for line in lines} <= set(" +-"), f"{self.path}: a line that is no change:\n{hunk}"
            before, after = ("".join(f"{line[1:]}\n" for line in lines if line[0] in signs) for signs in (" -", " +"))
            assert content.count(before) == 1, (
                f"{self.path} holds {content.count(before)} times what is changed:\n{hunk}"
            )
            content = content.replace(before, after)
        file.write_text(content, encoding="utf-8")


def recipes() -> dict[str, list[Block]]:
    """The blocks of each numbered section of the page, by its title."""
    sections = re.split(r"^## \d+\. (.*)\n", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
    fence = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```$', re.M | re.S)
    return {
        title: [Block(*found.groups()) for found in fence.finditer(text)]
        for title, text in zip(sections[::2], sections[1::2], strict=True)
    }


CHECKS = {
    "An advantage estimator": "estimator",
    "A reward type": "reward",
    "A flag of the trainer": "trainer_flag",
    "An architecture": "architecture",
    "An execution mode": "mode",
    "A memory recorder": "recorder",
    "A data source": "reader",
}


def test_the_page_has_these_recipes_of_at_most_three_files() -> None:
    assert list(recipes()) == list(CHECKS)
    table = dict(re.findall(r"^\| \[(?:an?) ([^\]]+)\]\(#[^)]*\) \| (\d) \|", PAGE.read_text(encoding="utf-8"), re.M))
    for title, blocks in recipes().items():
        touched = {block.path for block in blocks}
        assert 1 <= len(touched) <= MOST_FILES, f"{title} touches {sorted(touched)}"
        assert table[title.split(" ", 1)[1]] == str(len(touched)), f"the table of the page says so of {title}"


@pytest.fixture(scope="module")
def copy_of_the_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    for package in (ROOT / "packages").iterdir():
        shutil.copytree(
            package / "src", folder / "packages" / package.name / "src", ignore=shutil.ignore_patterns("__pycache__")
        )
    return folder


def apply_recipe(title: str, original: Path, target: Path) -> Path:
    shutil.copytree(original, target)
    for block in recipes()[title]:
        block.put_into(target)
    return target


def run_check(name: str, packages: Path, folder: Path) -> str:
    """What check ``name`` prints, run with the packages below ``packages`` and in ``folder``."""
    sources = sorted(map(str, packages.glob("packages/*/src")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sources, str(ROOT / "tests")])}
    folder.mkdir()
    found = subprocess.run(
        [sys.executable, __file__, name, str(packages)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


SLOW = {"estimator", "architecture"}


@pytest.mark.parametrize(
    "title", [pytest.param(t, marks=[pytest.mark.slow] if c in SLOW else [], id=c) for t, c in CHECKS.items()]
)
def test_a_recipe_works(title: str, copy_of_the_packages: Path, tmp_path: Path) -> None:
    packages = apply_recipe(title, copy_of_the_packages, tmp_path / "packages")
    assert run_check(CHECKS[title], packages, tmp_path / "run").endswith("works\n")


def test_the_code_of_the_recipes_is_clean(copy_of_the_packages: Path, tmp_path: Path) -> None:
    """All of them together, under the rules of the project."""
    packages = apply_recipe(next(iter(CHECKS)), copy_of_the_packages, tmp_path / "packages")
    for title in list(CHECKS)[1:]:
        for block in recipes()[title]:
            block.put_into(packages)
    touched = sorted({str(packages / block.path) for blocks in recipes().values() for block in blocks})
    for command in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--config", str(ROOT / "pyproject.toml"), *touched]
        found = subprocess.run(ruff, capture_output=True, text=True, check=False, timeout=120)
        assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    "name", [pytest.param(c, marks=[pytest.mark.slow] if c in SLOW else []) for c in CHECKS.values()]
)
def test_a_check_fails_without_its_recipe(name: str, copy_of_the_packages: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"median|contains|advantage.clip|llama|in_turn|python|\.csv"):
        run_check(name, copy_of_the_packages, tmp_path / "run")


# ---------------------------------------------------------------------- the checks; in a process of their own


@dataclasses.dataclass
class _Trained:
    metrics: dict[str, float]
    log_probs: list[Any]
    weights: dict[str, Any]


def _batch(vocabulary: int) -> Any:
    """Two groups of three samples, rewards 0, 1, 4 in each."""
    import numpy as np
    from relax_data.types import TrainBatch

    rng, n = np.random.default_rng(0), 6
    return TrainBatch(
        rollout_id=0,
        tokens=[rng.integers(4, vocabulary, 9) for _ in range(n)],
        response_lengths=np.full(n, 5),
        loss_masks=[np.ones(5, np.float32) for _ in range(n)],
        rollout_log_probs=[np.full(5, -4.0, np.float32) for _ in range(n)],
        rewards=np.array([0, 1, 4, 0, 1, 4], np.float32),
        group_ids=np.repeat([0, 1], 3),
        oldest_versions=np.zeros(n, np.int64),
        names=[f"row:{i}" for i in range(n)],
    )


def _trained(folder: str, **algorithm: Any) -> _Trained:
    """Trains one step of the model in ``folder`` in this process."""
    import socket

    from relax_train import settings as s
    from relax_train.trainer import Trainer

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    trainer = Trainer(
        s.TrainSettings(
            model=s.ModelSettings(hf_checkpoint=folder, bf16=False), algorithm=s.AlgorithmSettings(**algorithm)
        )
    )
    trainer.setup()
    try:
        weights = {
            name: tensor.clone() for bucket in trainer.weight_buckets(1 << 20) for name, tensor in bucket.items()
        }
        log_probs = trainer.log_probs(_batch(90))
        return _Trained(trainer.train(_batch(90), version=0), log_probs, weights)
    finally:
        trainer.close()


def _random_model(family: str, **more: Any) -> str:
    import torch
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        dtype="float32",
        **more,
    )
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained("model")
    return "model"


def check_estimator() -> None:
    """It is chosen by its flag, its advantages are right by hand, and the trainer takes a step with them."""
    import numpy as np
    from relax_train.algorithms import registry
    from relax_train.settings import AlgorithmSettings

    settings = AlgorithmSettings(advantage_estimator="median")
    assert settings.problems() == [], settings.problems()
    assert settings.compares_group
    assert "median: Reward minus the median" in registry.table_help(registry.ADVANTAGES)
    seen: list[Any] = []
    estimator = registry.ADVANTAGES["median"]

    def spy(inputs: Any) -> Any:
        seen.append(estimator(inputs))
        return seen[-1]

    registry.ADVANTAGES["median"] = dataclasses.replace(estimator, function=spy)
    metrics = _trained(_random_model("Qwen3"), advantage_estimator="median").metrics
    np.testing.assert_array_equal(np.stack(seen[0]), np.repeat([[-1], [0], [3], [-1], [0], [3]], 5, axis=1))
    assert metrics["train/grad_norm"] > 0


def check_reward() -> None:
    """It is chosen by its flag, through the settings and :func:`build_reward`, and scores samples."""
    import asyncio

    from relax_cli.main import train_help
    from relax_data.types import Prompt, Sample
    from relax_rollout.rewards import RewardError, build_reward
    from relax_rollout.settings import RewardSettings

    assert "{exact-match,math,contains}" in train_help()
    reward = build_reward(RewardSettings(rm_type="contains"))
    prompt = Prompt(prompt_id=0, epoch=0, source="a:1", text="2+2=", input_ids=[1], label=4)
    right, wrong = Sample(prompt, 0, response="it is 4."), Sample(prompt, 1, response="it is 5.")
    without = Sample(dataclasses.replace(prompt, label=None), 0, response="4")
    for sample in (right, wrong):
        asyncio.run(reward(sample))
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    with pytest.raises(RewardError, match="--label-key"):
        asyncio.run(reward(without))


def check_trainer_flag() -> None:
    """It stands in ``--help`` and on the page, its range is checked, and it is read."""
    import importlib.util

    import numpy as np
    from relax_cli.main import train_help
    from relax_data.types import StepManifest
    from relax_train.algorithms.advantages import advantage_inputs, compute_advantages
    from relax_train.settings import AlgorithmSettings

    assert "--advantage-clip" in train_help()
    spec = importlib.util.spec_from_file_location("make_pages", ROOT / "docs" / "make_pages.py")
    assert spec is not None
    assert spec.loader is not None
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    assert "| `--advantage-clip` | a number: above 0 | not set | Largest size of an advantage" in pages.configuration()
    new: dict[str, Any] = {"advantage_clip": 0.0}
    assert AlgorithmSettings(**new).problems() == ["--advantage-clip must be above 0, not 0.0"]
    batch = _batch(90)

    def largest(**flags: Any) -> float:
        chosen: dict[str, Any] = {"advantage_estimator": "rloo", **flags}
        settings = AlgorithmSettings(**chosen)
        inputs = advantage_inputs(StepManifest.of(batch), settings, own=range(len(batch)), masks=batch.loss_masks)
        return float(np.abs(np.stack(compute_advantages(inputs))).max())

    assert largest() == 3.5
    assert largest(advantage_clip=2.0) == 2.0
    assert largest(advantage_clip=0.5, normalize_advantages=True) == 0.5


def check_architecture() -> None:
    """The trainer computes what transformers does for such a model, trains it, and gives its weights back."""
    import torch
    from relax_train.models.architectures import model_shape
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = _random_model("Mistral", sliding_window=None)
    trained = _trained(folder)
    model, batch = AutoModelForCausalLM.from_pretrained(folder), _batch(90)
    for found, tokens in zip(trained.log_probs, batch.tokens, strict=True):
        row = torch.from_numpy(tokens)
        with torch.no_grad():
            expected = model(input_ids=row[None]).logits[0].log_softmax(-1)[3:-1].gather(1, row[4:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-5)
    assert trained.metrics["train/grad_norm"] > 0
    stored = load_file(f"{folder}/model.safetensors")
    assert set(stored) == set(trained.weights)
    assert all(torch.equal(stored[name], trained.weights[name]) for name in stored)
    config = model.config.to_dict()
    assert model_shape(config).parameters == sum(p.numel() for p in model.parameters())
    del config["sliding_window"]  # transformers then takes 4096
    with pytest.raises(ValueError, match="sliding_window 4096 is not supported"):
        model_shape(config)


def check_mode() -> None:
    """Its flag picks its controller, which runs steps on actors that only write down what they are asked."""
    import contextlib
    import io

    from cli import test_colocate_order as order
    from relax_cli.cluster.waits import StopFlag
    from relax_cli.config.settings import ClusterSettings, DebugSettings, RunSettings
    from relax_cli.controllers.modes import CONTROLLERS, mode_refusal
    from relax_cli.main import main
    from relax_cli.run.progress import Progress
    from relax_cli.run.tracking import Trackers
    from relax_train.settings import CheckpointSettings, ModelSettings, TrainSettings
    from rich.console import Console

    mode: dict[str, Any] = {"colocate": False, "in_turn": True}
    train = TrainSettings(model=ModelSettings(hf_checkpoint="m"), checkpoint=CheckpointSettings())
    config = order.Config(RunSettings(num_rollout=2), train, DebugSettings(), ClusterSettings(**mode))
    assert config.cluster.problems() == []
    assert mode_refusal(config.cluster) is None
    controller = CONTROLLERS[config.cluster.mode]
    assert controller.__name__ == "InTurnController"
    workers: Any = order.RecordingWorkers()
    controller(config, workers, Trackers([]), Progress(Console(file=io.StringIO())), StopFlag()).run()  # type: ignore[arg-type]
    assert workers.calls == [
        *("push_weights 0", "weight_versions"),
        *("generate 0 0", "train 0", "push_weights 1", "weight_versions"),
        *("generate 1 1", "train 1", "push_weights 2", "weight_versions"),
    ]
    for flags, expected in (
        (["--in-turn"], "in turn: generate and train in turn, each on its own devices"),
        ([], "colocate: generate and train in turn"),
    ):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main(["train", "--config", str(ROOT / "examples/arithmetic/train.toml"), "--dry-run", *flags]) == 0
        assert expected in printed.getvalue(), printed.getvalue()


def check_recorder() -> None:
    """It is chosen by its flag, and the observer of a training loop starts, dumps and stops it."""
    import tracemalloc

    from relax_cli.main import train_help
    from relax_profiling.recorders.training import build_observer
    from relax_profiling.settings import MemoryProfileSettings, TrainProfileSettings

    assert "{torch,memray,python}" in train_help()
    memory = MemoryProfileSettings(record_memory_history=True, memory_recorder="python", memory_snapshot_num_steps=1)
    assert memory.problems() == []
    observer = build_observer(TrainProfileSettings(), memory, trace_dir="traces", rank=0)
    observer.before_model()
    kept = [bytearray(1 << 20) for _ in range(4)]
    with observer.phase("train_overall", 0):
        assert tracemalloc.is_tracing()
    observer.close()
    assert not tracemalloc.is_tracing()
    (file,) = Path("traces/memory_snapshot").iterdir()
    assert file.suffix == ".tracemalloc"
    largest = tracemalloc.Snapshot.load(str(file)).statistics("lineno")[0]
    assert largest.size >= sum(map(len, kept))
    assert largest.traceback[0].filename == __file__


def check_reader() -> None:
    """Prompts come out of such a file through :func:`open_prompts`, and a bad one is refused with a reason."""
    from relax_data.errors import DataError
    from relax_data.prompts.open import open_prompts
    from relax_data.settings import DataSettings

    os.environ["RELAX_CACHE_DIR"] = os.getcwd()

    class Tokenizer:
        def __call__(self, texts: list[str], **_: bool) -> dict[str, list[list[int]]]:
            return {"input_ids": [[ord(c) for c in text] for text in texts]}

    Path("a.csv").write_text('input,label\n1+1=,2\n"what is\n2+2?",4\n3+3=,6\n')
    for streaming in (False, True):
        settings = DataSettings(prompt_data=("a.csv@[1:]",), label_key="label", use_streaming_dataset=streaming)
        source = open_prompts(settings, Tokenizer(), num_epoch=1)
        assert [(p.text, p.label) for p in source.next(9)] == [("what is\n2+2?", "4"), ("3+3=", "6")]
    Path("b.csv").write_text("input,label\n1+1=,2,3\n")
    with pytest.raises(DataError, match="row 1 has more fields"):
        open_prompts(DataSettings(prompt_data=("b.csv",)), Tokenizer(), num_epoch=1)


def _imported(packages: Path) -> Iterator[str]:
    """Modules of ours that do not come from the copy."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.startswith("relax_") and file and not Path(file).is_relative_to(packages):
            yield f"{name} from {file}"


if __name__ == "__main__":
    globals()[f"check_{sys.argv[1]}"]()
    strangers = list(_imported(Path(sys.argv[2])))
    assert not strangers, strangers
    print("works")
