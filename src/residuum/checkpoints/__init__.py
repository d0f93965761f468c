"""Checkpoints: safe reading, writing, live networks, and what the weights alone reveal."""

from residuum.checkpoints.reading import (
    as_checkpoint,
    build_model,
    checkpoint_from_module,
    load_checkpoint,
    locate,
    save_checkpoint,
    weights_hash,
)
from residuum.checkpoints.surfaces import (
    Inspection,
    ParameterSummary,
    first_layer,
    inspect_checkpoint,
    moment_of,
)
from residuum.networks.kinds import ASSUMED_RELU, ASSUMED_STRIDES
