"""The processes that Ray places: engines, the rollout manager, the trainer's ranks."""
