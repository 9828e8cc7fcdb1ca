"""New weights to engines, a bucket at a time.

Door: :func:`relax_rollout.weight_sync.push.push_weights`.
"""
