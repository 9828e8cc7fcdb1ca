"""New weights from the trainer's ranks to engines: one file for each way they can travel.

Door: :func:`relax_rollout.weight_sync.transports.make_transport`, which picks a
:class:`relax_rollout.weight_sync.base.WeightTransport` from the table ``TRANSPORTS``. To add one, write its file
beside these and name it in the table: ``ipc.py`` (CUDA IPC on shared GPUs), ``value.py`` (inside the request, on CPU),
``group.py`` (a process group for each engine, on devices of its own) and ``disk.py`` (files that engines read).

``push.py`` holds the steps of the first two, which reach all engines or none; ``outcome.py`` how the others end, which
can lose an engine. ``ranks.py`` is how the trainer's ranks act together, ``background.py`` what runs beside the thread
that makes the buckets. Of ``group.py``: ``lane.py`` is the way to one engine, ``pair_group.py`` the communication with
it, ``feeders.py`` which rank feeds whom. None of these knows SGLang, whose client is only the default of
``transports.py``.
"""
