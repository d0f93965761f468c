"""Train networks by gradient descent or margin maximization. Interrupted runs can be continued."""

from residuum.settings import TrainingConfig
from residuum.training.loop import TrainingProgress, TrainingState, initialize, make_release, train

__all__ = [
    "TrainingConfig",
    "TrainingProgress",
    "TrainingState",
    "initialize",
    "make_release",
    "train",
]
