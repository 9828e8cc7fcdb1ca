"""The Ray actors of a run, and typed handles with which the controller calls them.

Door: :class:`relax_cli.workers.group.WorkerGroups`, with a handle (``rollout_worker``, ``trainer_group``,
``engine_group``) over each kind of actor (``rollout``, ``trainer``, ``engine``).
"""
