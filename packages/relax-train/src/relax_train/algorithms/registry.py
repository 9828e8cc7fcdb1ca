"""The tables of algorithms: ``--advantage-estimator`` and ``--loss-type`` take the names that stand here.

Imports no torch: the settings read the tables. To add an algorithm, write its function in
:mod:`relax_train.algorithms.estimators` or :mod:`relax_train.algorithms.surrogates` and add one line here; its flag
then takes the name, and the first line of its docstring is its help. A function of the user, named ``module:function``,
is taken in place of a name.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from relax_data.errors import describe, did_you_mean
from relax_data.hooks import hook_problem, is_async, load_function
from relax_data.options import LARGEST_FLOAT, functions_help

from relax_train.algorithms import estimators, surrogates
from relax_train.algorithms.estimators import AdvantageInputs
from relax_train.algorithms.surrogates import LossInputs, Objective

EstimatorFunction = Callable[[AdvantageInputs], list[np.ndarray]]
LossFunction = Callable[[LossInputs], Objective]

ESTIMATOR_FLAG = "--advantage-estimator"
LOSS_FLAG = "--loss-type"


@dataclasses.dataclass(frozen=True)
class Estimator:
    """A function that estimates advantages, and what the checks need to know of it. Calling it calls the function.

    Attributes:
        function: from :class:`AdvantageInputs` to float64 ``[response]`` for each own sample.
        compares_group: whether it compares the responses to one prompt, so that a single one has the advantage 0.
        divides_by_std: whether it reads ``--disable-grpo-std-normalization``.
        whitens: whether it normalises over the tokens of the rollout, as ``--normalize-advantages`` would.
        sequence_ratio: whether the loss takes one probability ratio for a whole response (GSPO).
    """

    function: EstimatorFunction
    compares_group: bool = False
    divides_by_std: bool = False
    whitens: bool = False
    sequence_ratio: bool = False

    def __call__(self, inputs: AdvantageInputs) -> list[np.ndarray]:
        """Gives the advantages of every token of every own sample."""
        return self.function(inputs)


@dataclasses.dataclass(frozen=True)
class Loss:
    """A function that gives the objective of tokens, and what the checks need to know of it. Calling it calls that.

    Attributes:
        function: from :class:`LossInputs` to :class:`Objective`.
        token_ratio: whether it makes sense with the ratio of a token only, not with that of a response (GSPO).
    """

    function: LossFunction
    token_ratio: bool = False

    def __call__(self, inputs: LossInputs) -> Objective:
        """Gives what is maximised for each token."""
        return self.function(inputs)


ADVANTAGES: dict[str, Estimator] = {
    "grpo": Estimator(estimators.grpo, compares_group=True, divides_by_std=True),
    "rloo": Estimator(estimators.rloo, compares_group=True),
    "reinforce_plus_plus": Estimator(estimators.reinforce_plus_plus, whitens=True),
    "reinforce_plus_plus_baseline": Estimator(
        estimators.reinforce_plus_plus_baseline, compares_group=True, whitens=True
    ),
    "gspo": Estimator(estimators.gspo, compares_group=True, divides_by_std=True, sequence_ratio=True),
}
"""By the name for ``--advantage-estimator``."""

LOSSES: dict[str, Loss] = {"clip": Loss(surrogates.clip), "cispo": Loss(surrogates.cispo, token_ratio=True)}
"""By the name for ``--loss-type``."""


def names_with(fact: str) -> str:
    """The estimators of the table that have ``fact``, an attribute of :class:`Estimator`: ``grpo or gspo``."""
    return " or ".join(name for name, estimator in ADVANTAGES.items() if getattr(estimator, fact))


def table_help(table: Mapping[str, Estimator | Loss]) -> str:
    """Name and first line of the docstring of every entry, for ``--help``."""
    return functions_help({name: entry.function for name, entry in table.items()})


def choice_problem(flag: str, name: str, table: Iterable[str]) -> str | None:
    """Says what is wrong with the name of an algorithm, as far as that shows without an import of the user's code.

    Args:
        flag: for the message.
        name: an entry of ``table``, or ``module:function``.
        table: the known names.

    Returns:
        a message with the fix, or None.
    """
    known = list(table)
    if name in known:
        return None
    if ":" in name:
        return hook_problem(flag, name)
    others = f"is none of {', '.join(known)}, nor of the form module:function"
    return f"{flag} {name!r} {others}{did_you_mean(name, known)}"


def load_estimator(name: str) -> Estimator:
    """The estimator behind a value of ``--advantage-estimator``.

    A function of the user is imported, and what it returns is checked at every call: one finite ``[response]`` array
    for each own sample.

    Raises:
        ValueError: there is none of this name, it cannot be imported, or it does not take one argument.
    """
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    function = _load(ESTIMATOR_FLAG, name, ADVANTAGES, "the AdvantageInputs")

    def checked(inputs: AdvantageInputs) -> list[np.ndarray]:
        with _told(ESTIMATOR_FLAG, name):
            # A generator computes while it is read.
            found = function(_read_only(inputs))
            found = list(found) if inspect.isgenerator(found) else found
        return _checked_advantages(name, inputs, found)

    return Estimator(checked)


def load_loss(name: str) -> Loss:
    """The policy loss behind a value of ``--loss-type``.

    A function of the user is imported, and that it returns an :class:`Objective` for all tokens is checked at every
    call.

    Raises:
        ValueError: there is none of this name, it cannot be imported, or it does not take one argument.
    """
    if name in LOSSES:
        return LOSSES[name]
    function = _load(LOSS_FLAG, name, LOSSES, "the LossInputs")

    def checked(inputs: LossInputs) -> Objective:
        columns = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs) if f.name not in ("low", "high")}
        before = {column: tensor._version for column, tensor in columns.items()}  # counts changes in place
        with _told(LOSS_FLAG, name):
            found = function(inputs)
        changed = [f"inputs.{column}" for column, tensor in columns.items() if tensor._version != before[column]]
        if changed:
            raise ValueError(
                f"{LOSS_FLAG} {name!r} changed {', '.join(changed)} in place, which the trainer goes on with; compute "
                "new tensors instead"
            )
        return _checked_objective(name, inputs, found)

    return Loss(checked)


def _load(flag: str, name: str, table: Iterable[str], argument: str) -> Callable[[Any], Any]:
    problem = choice_problem(flag, name, table)
    if problem is not None:
        raise ValueError(problem)
    function = load_function(flag, name)
    if is_async(function):
        raise ValueError(f"{flag} {name!r} is an async function; write it with def alone, nothing here is waited for")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # one that is built in does not say what it takes
        return function
    try:
        signature.bind(None)
    except TypeError as error:
        raise ValueError(
            f"{flag} {name!r} must take one argument, {argument}, but its signature is {signature}: {error}"
        ) from error
    return function


@contextlib.contextmanager
def _told(flag: str, name: str) -> Iterator[None]:
    """Says of an error of the user's function whose it is.

    Raises:
        ValueError: the function raised; what it raised is chained.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() of the function would end the rank without a word
        raise ValueError(f"{flag} {name!r} raised {describe(error)}") from error


def _read_only(inputs: AdvantageInputs) -> AdvantageInputs:
    """Gives arrays with these numbers that cannot be written: the trainer goes on with the numbers."""

    def view(array: np.ndarray) -> np.ndarray:
        seen = array.view()
        seen.flags.writeable = False
        return seen

    return dataclasses.replace(
        inputs,
        rewards=view(inputs.rewards),
        group_ids=view(inputs.group_ids),
        trained_tokens=view(inputs.trained_tokens),
        own=view(inputs.own),
        masks=[view(mask) for mask in inputs.masks],
        kl=None if inputs.kl is None else [view(kl) for kl in inputs.kl],
    )


def _checked_objective(name: str, inputs: LossInputs, found: Any) -> Objective:
    """Gives what a user's loss returned, if it is what it must be.

    Raises:
        ValueError: it is not; the message says what of it.
    """
    start = f"{LOSS_FLAG} {name!r} must return relax_train.algorithms.surrogates.Objective(values, clipped_low, "
    start += "clipped_high) of tensors with one entry for each of the "
    shape, kind = inputs.log_probs.shape, type(inputs.log_probs)
    if not isinstance(found, Objective) or not all(isinstance(column, kind) for column in found):
        kinds = [type(column).__name__ for column in found] if isinstance(found, Objective) else type(found).__name__
        raise ValueError(f"{start}{shape[0]} tokens, not {kinds}")
    shapes = [column.shape for column in found]
    if shapes != [shape] * 3:
        raise ValueError(f"{start}{shape[0]} tokens, not tensors of the shapes {shapes}")
    values, *clipped = found
    if not values.is_floating_point():
        raise ValueError(f"{LOSS_FLAG} {name!r}: its values must be floating-point numbers, not {values.dtype}")
    if inputs.log_probs.requires_grad and not values.requires_grad:
        raise ValueError(
            f"{LOSS_FLAG} {name!r}: no gradient can flow through its values, so nothing would be learned; compute them "
            "from inputs.ratio or inputs.log_probs, without detach() and torch.no_grad()"
        )
    if wrong := [str(flags.dtype) for flags in clipped if str(flags.dtype) != "torch.bool"]:
        raise ValueError(f"{LOSS_FLAG} {name!r}: clipped_low and clipped_high must be torch.bool, not {wrong[0]}")
    return found


def _checked_advantages(name: str, inputs: AdvantageInputs, found: Any) -> list[np.ndarray]:
    """Gives what a user's estimator returned as float64 arrays, if it is what it must be.

    Raises:
        ValueError: it is not; the message says what of it.
    """
    start = f"{ESTIMATOR_FLAG} {name!r} must return a list with a [response] array for each of its samples"
    try:
        arrays = [np.asarray(column, dtype=np.float64) for column in found]
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # the last of torch, about its gradient
        raise ValueError(f"{start}, not {type(found).__name__}: {error}") from error
    if len(arrays) != len(inputs.masks):
        raise ValueError(f"{start}: it has {len(arrays)} arrays for {len(inputs.masks)} samples")
    for i, (column, mask) in enumerate(zip(arrays, inputs.masks, strict=True)):
        if column.shape != mask.shape:
            raise ValueError(f"{start}: number {i} has the shape {column.shape} for a response of {len(mask)} tokens")
        if not (np.abs(column[mask > 0]) <= LARGEST_FLOAT).all():
            raise ValueError(
                f"{start}: number {i} holds values that are not finite numbers of float32 on trained tokens"
            )
    return arrays
