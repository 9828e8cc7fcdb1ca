"""What is checked before anything starts, and the plan of a run.

Door: :func:`relax_cli.checks.validate.problems_of` (options), :func:`relax_cli.checks.plan.render` (``--dry-run``) and
:mod:`relax_cli.checks.doctor` (``relax doctor``). Nothing here imports torch.
"""
