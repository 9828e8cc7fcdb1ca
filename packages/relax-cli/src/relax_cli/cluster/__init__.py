"""Ray: a local one or one that is joined, where processes are placed, and waits that end.

Door: :mod:`relax_cli.cluster.ray_cluster` and the arithmetic of :mod:`relax_cli.cluster.placement`.
"""
