"""From a sample to its response: the requests of one sample, built in or of the user.

Door: :func:`relax_rollout.generation.generate.load_generate_function`.
"""
