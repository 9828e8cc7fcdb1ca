"""New weights from the trainer's ranks to engines: one file for each way they can travel.

Door: :func:`relax_rollout.weight_sync.transports.make_transport`, which picks a
:class:`relax_rollout.weight_sync.base.WeightTransport` from the table ``TRANSPORTS``. To add one, write its file
beside ``ipc.py`` (CUDA IPC on shared GPUs) and ``value.py`` (inside the request, on CPU) and name it in the table: a
process group would be ``group.py``, files that engines read ``disk.py``. ``push.py`` holds the steps they share,
``ranks.py`` how the trainer's ranks act together. None of these knows SGLang, whose client is only the default of
``transports.py``.
"""
