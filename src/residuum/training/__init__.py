"""Training: gradient descent as published, margin maximization, resumable runs."""

from residuum.settings import TrainingConfig
from residuum.training.loop import TrainingProgress, TrainingState, initialize, released, train

__all__ = ["TrainingConfig", "TrainingProgress", "TrainingState", "initialize", "released", "train"]
