"""Training: gradient descent as published, margin maximisation, resumable runs."""

from residuum.settings import TrainingConfig
from residuum.training.loop import TrainingProgress, TrainingState, initialise, released, train

__all__ = ["TrainingConfig", "TrainingProgress", "TrainingState", "initialise", "released", "train"]
