"""Functions of the user, named as ``module:function`` on the command line: the door for the rollout's hooks."""

from relax_data.hooks import hook_problem, is_async, load_function

__all__ = ["hook_problem", "is_async", "load_function"]
