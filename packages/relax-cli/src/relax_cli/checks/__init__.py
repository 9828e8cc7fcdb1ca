"""Checks before anything starts, and the plan of a run.

Doors: :func:`relax_cli.checks.validate.problems_of` (options), :func:`relax_cli.checks.plan.plan_text` (``--dry-run``)
and :mod:`relax_cli.checks.doctor` (``relax doctor``). Nothing here imports torch.
"""
