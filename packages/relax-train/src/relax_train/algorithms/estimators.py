"""Estimators of the advantage: from the rewards of a rollout to a number for every response token.

Host arithmetic in float64, without torch. An estimator sees the rewards and groups of ALL samples of the rollout and
the token columns of the samples of its own rank; what it needs of other ranks' tokens it adds up with
:attr:`AdvantageInputs.all_reduce`. To add one, write a function of :class:`AdvantageInputs` and give it a name in
:mod:`relax_train.algorithms.registry`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from relax_data.types import ROUNDING, equal_rewards

STD_FLOOR = 1e-6
"""Added to standard deviations, so that nearly equal rewards do not give huge advantages."""

Floats = NDArray[np.float64]
AllReduce = Callable[[Floats], Floats]


def alone(values: Floats) -> Floats:
    """The sum over one rank: :attr:`AdvantageInputs.all_reduce` of a rank that holds every sample."""
    return values


class EstimatorOptions(Protocol):
    """Settings that estimators read."""

    @property
    def advantage_estimator(self) -> str:
        """Name of the estimator."""
        ...

    @property
    def normalize_advantages(self) -> bool:
        """Whether advantages are whitened over the trained tokens afterwards."""
        ...

    @property
    def kl_coef(self) -> float:
        """Weight of the divergence from the reference model in the reward."""
        ...

    @property
    def disable_grpo_std_normalization(self) -> bool:
        """Whether advantages are left undivided by the standard deviation of their group."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """Argument of an estimator, to be read only. ``n`` samples of the rollout, ``m`` of them on this rank.

    Attributes:
        rewards: float64 ``[n]``, all samples.
        group_ids: int64 ``[n]``, equal for the responses to one prompt; groups need not be contiguous.
        trained_tokens: float64 ``[n]``, tokens of each response that are trained (sum of its mask), all samples.
        own: int64 ``[m]``, which of the samples this rank holds. Over the data-parallel ranks that ``all_reduce``
            spans, each sample is held once.
        masks: float32 ``[response]`` for each OWN sample, 1 on trained tokens.
        kl: float64 ``[response]`` for each OWN sample: ``log pi_old - log pi_ref`` of each token, the estimate k1 of
            the divergence from the reference model, on masked tokens too; None when ``--kl-coef`` is 0.
        settings: switches and coefficients, :class:`relax_train.settings.AlgorithmSettings`.
        all_reduce: sums an array over the ranks that hold the samples. All of them must call it equally often, with
            arrays of the same shape. The default is for a rank that holds everything.
    """

    rewards: Floats
    group_ids: NDArray[np.int64]
    trained_tokens: Floats
    own: NDArray[np.int64]
    masks: Sequence[np.ndarray]
    kl: Sequence[Floats] | None
    settings: EstimatorOptions
    all_reduce: AllReduce = alone

    def per_token(self, advantages: Floats) -> list[Floats]:
        """One number for each sample of the rollout ``[n]`` -> ``[response]`` arrays of it for each own sample."""
        return [np.full(len(mask), advantages[i]) for i, mask in zip(self.own, self.masks, strict=True)]

    def rewards_minus_kl(self) -> Floats:
        """``r_i - kl_coef * sum_t mask_t (log pi_old(t) - log pi_ref(t))``: InstructGPT (arXiv:2203.02155) equation 2.

        Returns:
            float64 ``[n]``, of all samples; the rewards themselves when ``--kl-coef`` is 0.
        """
        if self.kl is None:
            return self.rewards
        sums = np.zeros(len(self.rewards))
        sums[self.own] = [float((kl * mask).sum()) for kl, mask in zip(self.kl, self.masks, strict=True)]
        return self.rewards - self.settings.kl_coef * self.all_reduce(sums)

    def minus_kl_to_go(self, advantages: Floats) -> list[Floats]:
        """``A_i - kl_coef * sum_{u >= t} mask_u (log pi_old(u) - log pi_ref(u))`` for each token t.

        Args:
            advantages: ``[n]``, one for each sample of the rollout.

        Returns:
            ``[response]`` for each own sample.
        """
        spread = self.per_token(advantages)
        if self.kl is None:
            return spread
        to_go = [np.cumsum((kl * mask)[::-1])[::-1] for kl, mask in zip(self.kl, self.masks, strict=True)]
        return [values - self.settings.kl_coef * rest for values, rest in zip(spread, to_go, strict=True)]


def _groups(group_ids: ArrayLike) -> Iterator[NDArray[np.int64]]:
    """Positions of the members of each group, in ascending order."""
    ids = np.asarray(group_ids)
    order = np.argsort(ids, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(ids[order])) + 1)


def _within_groups(compare: Callable[[Floats], Floats], rewards: ArrayLike, group_ids: ArrayLike) -> Floats:
    """``compare`` of the rewards of each group; exactly 0 in a group of one and in one of equal rewards."""
    values = np.asarray(rewards, dtype=np.float64)
    result = np.zeros_like(values)
    for members in _groups(group_ids) if len(values) else ():
        of_group = values[members]
        if not equal_rewards(of_group):
            result[members] = compare(of_group)
    return result


def group_normalized(rewards: ArrayLike, group_ids: ArrayLike, *, divide_by_std: bool = True) -> Floats:
    """Rewards of each sample relative to its group: ``(r_i - mean(r)) / std(r)``, or ``r_i - mean(r)``.

    The standard deviation is the unbiased one (n - 1), plus :data:`STD_FLOOR`. A group of one sample has nothing to be
    compared with: its value is 0, as is, exactly, that of every sample of a group whose rewards are equal but for
    rounding (:func:`relax_data.types.equal_rewards`).

    Args:
        rewards: ``[n]``.
        group_ids: ``[n]``, equal within a group; groups need not be contiguous.
        divide_by_std: divide by the group's standard deviation.

    Returns:
        float64 ``[n]``.
    """

    def normalized(r: Floats) -> Floats:
        centred: Floats = r - r.mean()
        return centred / (r.std(ddof=1) + STD_FLOOR) if divide_by_std else centred

    return _within_groups(normalized, rewards, group_ids)


def leave_one_out(rewards: ArrayLike, group_ids: ArrayLike) -> Floats:
    """``r_i`` minus the mean of the OTHER rewards of its group; 0 where they are equal but for rounding, or alone.

    Args:
        rewards: ``[n]``.
        group_ids: ``[n]``, equal within a group; groups need not be contiguous.

    Returns:
        float64 ``[n]``.
    """
    return _within_groups(lambda r: r - (r.sum() - r) / (len(r) - 1), rewards, group_ids)


def whitened(advantages: Sequence[Floats], masks: Sequence[np.ndarray], all_reduce: AllReduce = alone) -> list[Floats]:
    """Advantages with mean 0 and variance 1 over all trained tokens, from sums that ranks add up.

    Count and sum go over the ranks first, then the sum of squared distances from the common mean. Variance is the mean
    of those (divided by the number of tokens); :data:`STD_FLOOR` is added to its root. Where that root is less than
    :data:`relax_data.types.ROUNDING` of the mean, all values are equal but for rounding, and the result is 0.

    Args:
        advantages: ``[response]`` for each own sample.
        masks: ``[response]`` for each own sample, 1 on trained tokens; the advantages of others may be anything.
        all_reduce: sums an array over the ranks that hold the samples.

    Returns:
        float64 ``[response]`` for each own sample; the input when no token is trained on any rank.
    """
    # Untrained tokens may hold anything, and not-a-number times 0 is not 0.
    pairs = [(np.where(m > 0, a, 0.0), m) for a, m in zip(advantages, masks, strict=True)]
    sums = [sum(float(m.sum(dtype=np.float64)) for m in masks), sum(float((a * m).sum()) for a, m in pairs)]
    count, total = all_reduce(np.array(sums, dtype=np.float64))
    if count == 0:
        return list(advantages)
    mean = total / count
    [squares] = all_reduce(np.array([sum(float(((a - mean) ** 2 * m).sum()) for a, m in pairs)], dtype=np.float64))
    std = np.sqrt(squares / count)
    if std <= ROUNDING * abs(mean):
        return [np.zeros_like(a) for a in advantages]
    return [(a - mean) / (std + STD_FLOOR) for a in advantages]


# ---------------------------------------------------------------------- the estimators


def grpo(inputs: AdvantageInputs) -> list[Floats]:
    """Reward minus the mean of its group, divided by the group's standard deviation.

    DeepSeekMath (arXiv:2402.03300) section 4.1.2, outcome supervision: ``A_{i,t} = (r_i - mean(r)) / std(r)`` over the
    responses to one prompt, the same for all tokens; here with the unbiased standard deviation. With ``--kl-coef`` the
    rewards are :meth:`AdvantageInputs.rewards_minus_kl`.

    ``--disable-grpo-std-normalization`` leaves ``r_i - mean(r)``: the advantage of Dr. GRPO (arXiv:2503.20783) section
    3.2, see :mod:`relax_train.algorithms` for the rest of Dr. GRPO.
    """
    divide = not inputs.settings.disable_grpo_std_normalization
    return inputs.per_token(group_normalized(inputs.rewards_minus_kl(), inputs.group_ids, divide_by_std=divide))


def rloo(inputs: AdvantageInputs) -> list[Floats]:
    """Reward minus the mean of the other rewards of its group (leave one out).

    REINFORCE leave-one-out (arXiv:2402.14740), the estimator of the section "RLOO", after Kool et al. 2019 "Buy 4
    REINFORCE samples, get a baseline for free!": ``A_i = R_i - 1 / (k - 1) * sum_{j != i} R_j`` over the k responses to
    one prompt, which is ``k / (k - 1) * (R_i - mean(R))``. ``R`` is the reward minus the divergence of the whole
    response (:meth:`AdvantageInputs.rewards_minus_kl`), as in the paper, where ``--kl-coef`` is called beta.
    """
    return inputs.per_token(leave_one_out(inputs.rewards_minus_kl(), inputs.group_ids))


def reinforce_plus_plus(inputs: AdvantageInputs) -> list[Floats]:
    """Reward minus the KL of the tokens still to come, normalised over all trained tokens of the rollout; no groups.

    REINFORCE++ (arXiv:2501.03262v9) equations 4 and 5: ``A_t = r - beta * sum_{u >= t} KL(u)`` with
    ``KL(u) = log pi_old(u) - log pi_ref(u)`` and beta = ``--kl-coef``, then
    ``(A_t - mean(A)) / (std(A) + eps)`` over all trained tokens of the rollout. No discount, masked tokens have no KL.
    """
    return whitened(inputs.minus_kl_to_go(inputs.rewards), inputs.masks, inputs.all_reduce)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> list[Floats]:
    """Reward minus the mean of its group, normalised over all trained tokens of the rollout.

    REINFORCE++ with baseline (arXiv:2501.03262v9) equations 6 and 7: ``A' = r_i - mean(r)`` over the responses to one
    prompt, then ``(A' - mean(A')) / (std(A') + eps)`` over all trained tokens of the rollout.

    The paper has its KL term in the loss (equation 8): ``--use-kl-loss --kl-loss-type k2``. With ``--kl-coef`` the
    divergence of the tokens still to come is subtracted from ``A'``, as in equation 4.
    """
    centred = group_normalized(inputs.rewards, inputs.group_ids, divide_by_std=False)
    return whitened(inputs.minus_kl_to_go(centred), inputs.masks, inputs.all_reduce)


def gspo(inputs: AdvantageInputs) -> list[Floats]:
    """As grpo, with one probability ratio for a whole response in the loss; needs a much smaller --eps-clip.

    GSPO (arXiv:2507.18071) equation 6 is the advantage of :func:`grpo`. What differs is the ratio, equation 7, the
    geometric mean over the trained tokens of the response: see
    :func:`relax_train.algorithms.losses.policy_loss`. It moves far less than the ratio of a token: the paper (section
    5.1) clips it at ``--eps-clip 3e-4 --eps-clip-high 4e-4``, where it clips GRPO at 0.2 and 0.27.
    """
    return grpo(inputs)
