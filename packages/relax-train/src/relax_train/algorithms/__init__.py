"""Reinforcement learning itself: advantages, losses, log-probabilities, the reference model.

Doors: :func:`relax_train.algorithms.advantages.compute_advantages` and
:func:`relax_train.algorithms.losses.policy_loss`. An algorithm is a function in a table of
:mod:`relax_train.algorithms.registry`; this page says which there are and how they are put together.

**What is minimised.** Over the trained tokens t of the responses i of an optimizer step::

    sum_{i,t} w_{i,t} [ -tis_{i,t} f(rho_{i,t}, A_{i,t}, log pi_{i,t}) + kl_loss_coef KL_{i,t} - entropy_coef H_{i,t} ]

``A`` comes from ``--advantage-estimator``, ``f`` from ``--loss-type``, ``tis`` is 1 without ``--use-tis``. The weights
``w`` add up to 1: the mean over the trained tokens of a response and then over responses, or, with
``--calculate-per-token-loss``, the mean over all trained tokens of the step.

**Advantages** (``--advantage-estimator``; numbers in brackets are those of equations):

================================  ======================================================  ==========================
name                              advantage                                               from
================================  ======================================================  ==========================
``grpo``                          (R - mean(R)) / std(R) over the group                   arXiv:2402.03300 s. 4.1.2
``rloo``                          R - mean of the other R of the group                    arXiv:2402.14740
``reinforce_plus_plus``           r - KL still to come, normalised over all tokens        arXiv:2501.03262v9 (4, 5)
``reinforce_plus_plus_baseline``  r - mean(r) over the group, normalised over all tokens  arXiv:2501.03262v9 (6, 7)
``gspo``                          as ``grpo``; rho is that of the whole response          arXiv:2507.18071 (5-7, 14)
================================  ======================================================  ==========================

A group is the responses to one prompt. With ``--kl-coef`` c, R is r - c * (KL of the whole response); the two forms of
reinforce_plus_plus subtract at each token c * (KL of this token and those after it) instead. KL is the estimate k1,
log pi_old - log pi_ref, of trained tokens. ``--normalize-advantages`` normalises the result over all trained tokens of
the rollout, which the two forms of reinforce_plus_plus do anyway.

**Losses** (``--loss-type``), with c(x) = clip(x, 1 - eps_clip, 1 + eps_clip_high):

=========  ================================================  ==========================================
name       f, which is maximised                             from
=========  ================================================  ==========================================
``clip``   min(rho A, c(rho) A)                              arXiv:1707.06347 (7), arXiv:2503.14476 (8)
``cispo``  sg(c(rho)) A log pi, where sg stops the gradient  arXiv:2506.13585 (4, 5)
=========  ================================================  ==========================================

rho is pi / pi_old of the token; with gspo it is that of the whole response, the geometric mean over its trained tokens.
That moves far less: gspo needs an ``--eps-clip`` of about 3e-4 (and ``--eps-clip-high`` 4e-4). rho differs from 1 only
when a rollout has several optimizer steps (``--global-batch-size``, ``--num-steps-per-rollout``).

**Named algorithms as combinations of flags.**

- DAPO (arXiv:2503.14476): ``--eps-clip-high 0.28 --calculate-per-token-loss`` and the filter of equal rewards,
  ``--dynamic-sampling-filter-path relax_rollout.filters:reward_nonzero_std``.
- REINFORCE++ with baseline as in its paper: ``--advantage-estimator reinforce_plus_plus_baseline --use-kl-loss
  --kl-loss-type k2 --kl-loss-coef LAMBDA`` (equation 8) instead of ``--kl-coef``.
- CISPO as in its paper: ``--loss-type cispo --calculate-per-token-loss --eps-clip 0.999 --eps-clip-high HIGH``. The
  paper takes the mean over the tokens of each group, here it is over those of the step.
- GSPO as in its paper: ``--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4``. With
  ``--calculate-per-token-loss`` long responses weigh more than short ones, which the paper does not do.
- Dr. GRPO (arXiv:2503.20783 section 3.2): ``--disable-grpo-std-normalization --calculate-per-token-loss``. Its
  advantage, r - mean(r), is exact. Its loss is the sum over ALL tokens of the responses divided by a constant: the
  number of responses times one fixed length, the same for every response and step. Here the same sum is divided by the
  number of trained tokens of the step. So all tokens of a step have equal weight, as in Dr. GRPO, and the gradient of a
  step is that of Dr. GRPO times (fixed length / mean trained length of the responses of the step): ONE factor for the
  whole step, which changes from step to step with the mean length. Adam divides a gradient by its usual size, so most
  of the factor has no effect there; ``--clip-grad`` does see it. Without ``--calculate-per-token-loss`` a token of a
  short response weighs more than one of a long response, which is what Dr. GRPO removes.

**An algorithm of your own** is a function that a flag names: ``--advantage-estimator my_algorithms:above_half``::

    import numpy as np

    def above_half(inputs):
        "The reward above one half, the same for every token."
        return [np.full(len(mask), inputs.rewards[i] - 0.5) for i, mask in zip(inputs.own, inputs.masks)]

and ``--loss-type my_algorithms:no_clip`` likewise: see :class:`relax_train.algorithms.estimators.AdvantageInputs`,
:class:`relax_train.algorithms.surrogates.LossInputs` and :class:`relax_train.algorithms.surrogates.Objective` for what
they get and give.
"""
