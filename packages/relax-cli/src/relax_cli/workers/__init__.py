"""The Ray actors of a run, and the groups that the controller calls.

Door: :class:`relax_cli.workers.group.WorkerGroups`.
"""
