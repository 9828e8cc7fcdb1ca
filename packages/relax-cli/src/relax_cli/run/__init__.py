"""One launch of ``relax train`` from the outside: its folder, its log lines and metrics, its exit code.

Door: :func:`relax_cli.run.launch.run`.
"""
