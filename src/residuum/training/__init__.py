"""Training: gradient descent as published, margin maximisation, resumable runs."""

from residuum.training.config import TrainingConfig, TrainingState
from residuum.training.loop import Progress, initialise, released, train

__all__ = ["Progress", "TrainingConfig", "TrainingState", "initialise", "released", "train"]
