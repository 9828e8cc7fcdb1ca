"""One controller for each mode of execution: what a step does, in which order, and who waits for whom.

Door: :data:`relax_cli.controllers.modes.CONTROLLERS`; what all modes share is in :mod:`relax_cli.controllers.base`.
"""
