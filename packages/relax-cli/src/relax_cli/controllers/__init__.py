"""One controller for each mode of execution: what a step does, in which order, and who waits for whom.

Door: :class:`relax_cli.controllers.colocate.ColocateRun`.
"""
