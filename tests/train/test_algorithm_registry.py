"""The tables of algorithms, and functions of the user in their place."""

import dataclasses
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from relax_train.algorithms.advantages import compute_advantages
from relax_train.algorithms.estimators import AdvantageInputs
from relax_train.algorithms.losses import policy_loss
from relax_train.algorithms.registry import ADVANTAGES, LOSSES, Estimator, load_estimator, load_loss
from relax_train.algorithms.surrogates import clip
from relax_train.settings import AlgorithmSettings, ModelSettings, TrainSettings

OWN_ESTIMATORS = """
import numpy as np

def half(inputs):
    "The reward above a half, less for long responses."
    return [np.full(len(m), r - 0.5) / t for m, r, t in zip(inputs.masks, inputs.rewards, inputs.trained_tokens)]

def two(inputs, more):
    return []

async def waits(inputs):
    return []

def none(inputs):
    return None

def few(inputs):
    return half(inputs)[1:]

def per_sample(inputs):
    return list(inputs.rewards)

def short(inputs):
    return [a[:1] for a in half(inputs)]

def broken(inputs):
    return [a * float("nan") for a in half(inputs)]

def raises(inputs):
    raise KeyError("x")

def leaves(inputs):
    raise SystemExit(0)

def breaks_off(inputs):
    yield from half(inputs)[:1]
    raise IndexError("no more")

def writes(inputs):
    for mask in inputs.masks:
        mask[:] = 0
    return half(inputs)

def writes_lengths(inputs):
    inputs.trained_tokens[:] = 1
    return half(inputs)

def huge(inputs):
    return [a * 1e300 for a in half(inputs)]

def integers(inputs):
    return [[10**400] * len(m) for m in inputs.masks]

def trained_only(inputs):
    return [np.where(m > 0, a, np.nan) for a, m in zip(half(inputs), inputs.masks)]

def step_by_step(inputs):
    yield from half(inputs)

number = 3
"""

OWN_LOSSES = """
from relax_train.algorithms.surrogates import Objective

def no_clip(inputs):
    never = inputs.mask > 1
    return Objective(inputs.ratio * inputs.advantages, never, never)

def values_alone(inputs):
    return inputs.ratio * inputs.advantages

def total(inputs):
    never = inputs.mask > 1
    return Objective((inputs.ratio * inputs.advantages).sum(), never, never)

def in_numpy(inputs):
    return Objective(*(column.detach().numpy() for column in no_clip(inputs)))

def raises(inputs):
    raise KeyError("x")

def detached(inputs):
    never = inputs.mask > 1
    return Objective((inputs.ratio * inputs.advantages).detach(), never, never)

def in_integers(inputs):
    never = inputs.mask > 1
    return Objective((inputs.ratio * inputs.advantages).long(), never, never)

def numbers_for_flags(inputs):
    return Objective(inputs.ratio * inputs.advantages, inputs.mask, inputs.mask)

def writes(inputs):
    inputs.rollout_log_probs.zero_()
    inputs.mask.zero_()
    return no_clip(inputs)

def logarithm(inputs):
    never = inputs.mask > 1
    return Objective(inputs.ratio * inputs.advantages.abs().log(), never, never)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own_estimators.py").write_text(OWN_ESTIMATORS)
    (tmp_path / "own_losses.py").write_text(OWN_LOSSES)
    return str(tmp_path)


def inputs() -> AdvantageInputs:
    masks = [np.array(m, np.float32) for m in ([1, 1], [1, 0, 1])]
    return AdvantageInputs(
        rewards=np.array([1.0, 0.0]),
        group_ids=np.array([0, 0]),
        trained_tokens=np.array([2.0, 2.0]),
        own=np.array([0, 1]),
        masks=masks,
        kl=None,
        settings=AlgorithmSettings(),
    )


# ---------------------------------------------------------------------- the tables


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_estimator_has_its_name_its_paper_and_a_line_of_help(name: str) -> None:
    function = ADVANTAGES[name].function
    text = inspect.getdoc(function) or ""
    assert function.__name__ == name
    assert "arXiv:" in text
    assert f"{name}: {text.splitlines()[0]}" in help_of("advantage_estimator")
    assert load_estimator(name) is ADVANTAGES[name]


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_its_name_its_paper_and_a_line_of_help(name: str) -> None:
    function = LOSSES[name].function
    text = inspect.getdoc(function) or ""
    assert function.__name__ == name
    assert "arXiv:" in text
    assert f"{name}: {text.splitlines()[0]}" in help_of("loss_type")
    assert load_loss(name) is LOSSES[name]


def help_of(name: str) -> str:
    text: str = AlgorithmSettings.__dataclass_fields__[name].metadata["help"]
    return text


def test_a_new_estimator_is_one_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADVANTAGES, "ones", Estimator(lambda inputs: [np.ones(len(m)) for m in inputs.masks]))
    assert AlgorithmSettings(advantage_estimator="ones").problems(frozenset({"advantage_estimator"})) == []
    assert load_estimator("ones")(inputs())[1].tolist() == [1.0, 1.0, 1.0]


def test_the_tables_import_no_torch() -> None:
    code = "import relax_train.algorithms.registry, relax_train.settings, sys; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "False"


def test_the_guide_names_every_entry() -> None:
    """The docstring of the package is the page that users read."""
    import relax_train.algorithms as package

    guide = package.__doc__ or ""
    for name in [*ADVANTAGES, *LOSSES]:
        assert f"``{name}``" in guide, name


def test_the_example_of_the_guide_runs(tmp_path: Path) -> None:
    import relax_train.algorithms as package

    example = (package.__doc__ or "").rpartition("::\n")[2].partition("\n\nand")[0]
    (tmp_path / "my_algorithms.py").write_text(textwrap.dedent(example))
    found = load_estimator(f"{tmp_path}/my_algorithms.py:above_half")(inputs())
    assert [a.tolist() for a in found] == [[0.5, 0.5], [-0.5, -0.5, -0.5]]


# ---------------------------------------------------------------------- functions of the user


def test_an_estimator_of_the_user_is_called(own: str) -> None:
    name = f"{own}/own_estimators.py:half"
    assert AlgorithmSettings(advantage_estimator=name).problems(frozenset({"advantage_estimator"})) == []
    found = load_estimator(name)(inputs())
    assert [a.tolist() for a in found] == [[0.25, 0.25], [-0.25, -0.25, -0.25]]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("hlaf", "has no function 'hlaf'; did you mean 'half'"),
        ("number", "is a int, not a function"),
        ("two", r"must take one argument, the AdvantageInputs, but its signature is \(inputs, more\)"),
        ("waits", "is an async function"),
    ],
)
def test_what_cannot_be_an_estimator_is_refused_before_anything_is_loaded(
    own: str, function: str, message: str
) -> None:
    from relax_train.trainer import Trainer

    algorithm = AlgorithmSettings(advantage_estimator=f"{own}/own_estimators.py:{function}")
    with pytest.raises(ValueError, match=f"--advantage-estimator '.*{message}"):
        Trainer(TrainSettings(model=ModelSettings(hf_checkpoint="missing"), algorithm=algorithm))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("none", "not NoneType"),
        ("few", "it has 1 arrays for 2 samples"),
        ("per_sample", r"number 0 has the shape \(\) for a response of 2 tokens"),
        ("short", r"number 0 has the shape \(1,\) for a response of 2 tokens"),
        ("broken", "number 0 holds values that are not finite numbers of float32 on trained tokens"),
        ("huge", "number 0 holds values that are not finite numbers of float32 on trained tokens"),
        ("integers", "int too large"),
    ],
)
def test_what_an_estimator_of_the_user_returns_is_checked(own: str, function: str, message: str) -> None:
    estimator = load_estimator(f"{own}/own_estimators.py:{function}")
    with pytest.raises(ValueError, match=rf"must return a list with a \[response\] array.*{message}"):
        estimator(inputs())


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("raises", "KeyError: 'x'"),
        ("leaves", "SystemExit: 0"),
        ("breaks_off", "IndexError: no more"),
        ("writes", "ValueError: .* read-only"),
        ("writes_lengths", "ValueError: .* read-only"),
    ],
)
def test_an_estimator_that_raises_is_named(own: str, function: str, what: str) -> None:
    given = inputs()
    with pytest.raises(ValueError, match=f"--advantage-estimator '.*:{function}' raised {what}"):
        load_estimator(f"{own}/own_estimators.py:{function}")(given)
    assert [m.tolist() for m in given.masks] == [[1, 1], [1, 0, 1]]
    assert given.trained_tokens.tolist() == [2, 2]


def test_an_estimator_may_give_its_arrays_one_by_one(own: str) -> None:
    found = load_estimator(f"{own}/own_estimators.py:step_by_step")(inputs())
    assert [a.tolist() for a in found] == [[0.25, 0.25], [-0.25, -0.25, -0.25]]


def test_what_an_estimator_gives_untrained_tokens_does_not_reach_the_others(own: str) -> None:
    given = dataclasses.replace(inputs(), settings=AlgorithmSettings(normalize_advantages=True))
    found = compute_advantages(given, load_estimator(f"{own}/own_estimators.py:trained_only"))
    assert [a[m > 0].tolist() for a, m in zip(found, given.masks, strict=True)] == [
        pytest.approx([1, 1], abs=1e-5),
        pytest.approx([-1, -1], abs=1e-5),
    ]


def loss_with(name: str, mask: Sequence[int] = (1, 1)) -> Any:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    columns = {"weights": [m / 2 for m in mask], "mask": mask, "advantages": [2.0, -1.0], "rollout_log_probs": [-1, -2]}
    tensors: dict[str, Any] = {key: torch.tensor(column, dtype=torch.float32) for key, column in columns.items()}
    old = torch.tensor([-2.0, -2.0])
    settings = AlgorithmSettings(loss_type=name)
    return policy_loss(log_probs, torch.zeros(2), old_log_probs=old, settings=settings, **tensors)[0].item()


def test_a_loss_of_the_user_is_called(own: str) -> None:
    assert loss_with(f"{own}/own_losses.py:no_clip") == pytest.approx(-(np.e * 2 - 1) / 2, abs=1e-6)
    assert loss_with("clip") == pytest.approx(-(1.2 * 2 - 1) / 2, abs=1e-6)


@pytest.mark.parametrize(("function", "what"), [("values_alone", "Tensor"), ("total", "tensors of the shapes")])
def test_what_a_loss_of_the_user_returns_is_checked(own: str, function: str, what: str) -> None:
    with pytest.raises(ValueError, match=f"--loss-type .* must return .*Objective.* of the 2 tokens, not {what}"):
        loss_with(f"{own}/own_losses.py:{function}")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", "raised KeyError: 'x'"),
        ("in_numpy", "must return .* not \\['ndarray', 'ndarray', 'ndarray'\\]"),
        ("detached", "no gradient can flow through its values"),
        ("in_integers", "its values must be floating-point numbers, not torch.int64"),
        ("numbers_for_flags", "clipped_low and clipped_high must be torch.bool, not torch.float32"),
        ("writes", "changed inputs.rollout_log_probs, inputs.mask in place"),
    ],
)
def test_a_loss_that_cannot_be_used_is_named(own: str, function: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"--loss-type '.*:{function}'.* ?{message}"):
        loss_with(f"{own}/own_losses.py:{function}")


def test_what_a_loss_gives_untrained_tokens_is_ignored(own: str) -> None:
    """The advantage of an untrained token is 0, and its logarithm is not finite."""
    name = f"{own}/own_losses.py:logarithm"
    assert loss_with(name, mask=(1, 0)) == pytest.approx(-np.e * np.log(2) / 2, abs=1e-6)


def test_a_callable_without_a_signature_is_taken() -> None:
    assert callable(load_loss("relax_train.algorithms.surrogates:clip").function)
    assert load_loss("clip").function is clip
