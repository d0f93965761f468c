"""Training: gradient descent as published, margin maximisation, resumable runs."""

from residuum.settings import TrainingConfig
from residuum.training.loop import Progress, TrainingState, initialise, released, train

__all__ = ["Progress", "TrainingConfig", "TrainingState", "initialise", "released", "train"]
