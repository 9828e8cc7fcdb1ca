"""``relax train``, ``relax doctor`` and ``relax report``: options, checks, the cluster, and the controller of a run.

Door: :func:`relax_cli.main.main`.
"""
