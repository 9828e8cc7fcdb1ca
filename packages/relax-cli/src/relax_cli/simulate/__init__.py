"""`relax simulate`: a model of one training step in each mode, to choose a mode, a split of the GPUs and a staleness.

Doors: :func:`relax_cli.simulate.command.main` is the command, :func:`relax_cli.simulate.model.simulate` the model.
"""
