"""Read what a release (a model file) stores with the weights: optimizer state and initial weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from residuum.errors import CheckpointError
from residuum.io.estimators import read_training_state
from residuum.io.inert import Block
from residuum.io.optimizer_state import TORCH_MOMENTS, remove_weight_decay
from residuum.io.release import Release
from residuum.io.release_weights import find_weights, flatten_blocks
from residuum.io.tree import walk
from residuum.networks.network import Network
from residuum.records import Knowledge

# The provenance (recorded source) of knowledge that the model file itself stores.
RELEASE = "release"


@dataclass(frozen=True, eq=False)
class StoredKnowledge:
    """What a file stores with the weights.

    Attributes:
        moment: Mean of recent gradients by parameter name, None if the file stores no such mean.
        theta0: Initial weights by parameter name, None if the file does not reveal them.
        notes: Sentences that say which parameters the optimizer state was assigned to, and where the initial
            weights come from.
    """

    moment: dict[str, Tensor] | None = None
    theta0: dict[str, Tensor] | None = None
    notes: tuple[str, ...] = ()


def add_stored_knowledge(release: Release, checkpoint: Network, knowledge: Knowledge) -> Knowledge:
    """Add what the release itself stores to what an attacker knows.

    An attacker who has the weights also has the optimizer state and the initial weights in the same file.
    Values that ``knowledge`` already holds are not replaced.

    Args:
        release: The release that holds the weights.
        checkpoint: The network that was read from ``release``.
        knowledge: What the attacker knows in addition to the release.

    Returns:
        The knowledge with the optimizer state and the initial weights that the release stores.
    """
    stored = read_stored_knowledge(release, checkpoint)
    added: dict[str, Any] = {}
    if stored.moment is not None and knowledge.moment is None:
        added["moment"] = stored.moment
    if stored.theta0 is not None and knowledge.theta0 is None:
        added["theta0"] = stored.theta0
    provenance = {**knowledge.provenance, **dict.fromkeys(added, RELEASE)}
    return knowledge.replace(**added, provenance=provenance) if added else knowledge


def remove_stored_knowledge(knowledge: Knowledge) -> Knowledge:
    """Remove what the release itself stores from what an attacker knows.

    :func:`add_stored_knowledge` can add these values again, if the release still stores them.

    Args:
        knowledge: What the attacker knows, which may include values from the release.

    Returns:
        The knowledge without the values from the release.
    """
    stored_names = [name for name, source in knowledge.provenance.items() if source == RELEASE]
    provenance = {k: v for k, v in knowledge.provenance.items() if k not in stored_names}
    return knowledge.replace(**dict.fromkeys(stored_names), provenance=provenance)


def read_stored_knowledge(release: Release, checkpoint: Network) -> StoredKnowledge:
    """Read what a release stores with the weights.

    Args:
        release: The release that holds the weights.
        checkpoint: The network that was read from ``release``.

    Returns:
        The optimizer state and the initial weights.
    """
    if release.kind in ("pickle", "skops"):
        return StoredKnowledge(*read_training_state(release))
    if release.kind != "torch":
        return StoredKnowledge()
    moment, notes = _read_optimizer_state(release, checkpoint)
    return StoredKnowledge(moment or None, None, notes)


def _read_optimizer_state(
    release: Release, checkpoint: Network
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the optimizer's means of recent gradients by parameter name, and notes on the matching."""
    network_names = {source: name for name, source in checkpoint.source_names.items()}
    try:
        parameters = [
            name for name in flatten_blocks(find_weights(release)) if name in network_names
        ]
    except CheckpointError:
        return {}, ()
    moments: dict[str, Tensor] = {}
    notes: list[str] = []
    for place in walk(release.content):
        optimizer_state = place.value
        if not (
            isinstance(optimizer_state, dict) and {"state", "param_groups"} <= {*optimizer_state}
        ):
            continue
        matches, match_notes = _match_parameters(
            optimizer_state, parameters, checkpoint, network_names
        )
        for name, (state, group) in matches.items():
            weight = checkpoint.theta[network_names[name]]
            moment_tensors = {k: state[k].tensor().to(weight) for k in TORCH_MOMENTS if k in state}
            # torch stores the flag ``decoupled_weight_decay`` since version 2.7.
            # Without this flag we treat Adam as AdamW, which does not add weight decay to the gradients.
            stored_flag = group.get("decoupled_weight_decay")
            is_decoupled = stored_flag if isinstance(stored_flag, bool) else "betas" in group
            moment = remove_weight_decay(moment_tensors, group, weight, is_decoupled)
            if moment is not None and bool(moment.isfinite().all()):
                moments[network_names[name]] = moment
        notes += match_notes if matches else []
    return moments, tuple(notes)


def _match_parameters(
    optimizer: dict[str, Any],
    parameters: list[str],
    checkpoint: Network,
    network_names: dict[str, str],
) -> tuple[dict[str, tuple[dict[str, Block], dict[str, Any]]], list[str]]:
    """Match the entries of an optimizer with the parameters of the network.

    Args:
        optimizer: The state dict of the optimizer.
        parameters: Names of the parameters in the file, in the order of the file.
        checkpoint: The network.
        network_names: The name in the network of each parameter name in the file.

    Returns:
        The optimizer state and the options of each matched parameter, by its name in the file, and notes.
    """
    shapes = {
        name_or_number: tuple(checkpoint.theta[network_names[name_or_number]].shape)
        for name_or_number in parameters
    }
    state, groups = optimizer["state"], optimizer["param_groups"]
    state = state if isinstance(state, dict) else {}
    entries: list[tuple[Any, str, dict[str, Block], dict[str, Any]]] = []
    for group in groups if isinstance(groups, list) else ():
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            continue
        listed_names = group.get("param_names")
        has_names = isinstance(listed_names, list) and len(listed_names) == len(group["params"])
        param_names = listed_names if has_names else None
        for i, parameter_number in enumerate(group["params"]):
            parameter_state = (
                state.get(parameter_number) if isinstance(parameter_number, str | int) else None
            )
            parameter_state = parameter_state if isinstance(parameter_state, dict) else {}
            blocks = {
                k: tensors for k, tensors in parameter_state.items() if isinstance(tensors, Block)
            }
            name_or_number = param_names[i] if param_names else parameter_number
            entries.append(
                (
                    parameter_number,
                    name_or_number if isinstance(name_or_number, str) else "",
                    blocks,
                    group,
                )
            )

    def get_shape(blocks: dict[str, Block]) -> tuple[int, ...] | None:
        return next((blocks[k].shape for k in TORCH_MOMENTS if k in blocks), None)

    matches_by_name = {
        name_in_file: (tensors, options)
        for _, name_in_file, tensors, options in entries
        if name_in_file in shapes and get_shape(tensors) == shapes[name_in_file]
    }
    if matches_by_name:
        return matches_by_name, []
    entry_count = len(entries)
    # Match the optimizer entries in order with the last parameters of the network. If the shapes do not fit,
    # try earlier parameters.
    for first_parameter in reversed(range(len(parameters) - entry_count + 1)):
        parameters_and_entries = list(
            zip(parameters[first_parameter : first_parameter + entry_count], entries, strict=True)
        )
        if parameters_and_entries and all(
            get_shape(tensors) in (None, shapes[name_in_file])
            for name_in_file, (_, _, tensors, _) in parameters_and_entries
        ):
            note = (
                f"optimizer state of {entry_count} parameters was matched with the last parameters "
                "that fit"
            )
            options_and_state_by_name = {
                name_in_file: (tensors, options)
                for name_in_file, (_, _, tensors, options) in parameters_and_entries
                if get_shape(tensors) is not None
            }
            return options_and_state_by_name, [note] if entry_count < len(parameters) else []
    unmatched = list(parameters)
    options_and_state_by_name = dict[str, tuple[dict[str, Block], dict[str, Any]]]()
    for _, _, blocks, group in entries:
        name_or_number = next(
            (
                name_in_file
                for name_in_file in unmatched
                if shapes[name_in_file] == get_shape(blocks)
            ),
            None,
        )
        if name_or_number is not None:
            unmatched.remove(name_or_number)
            options_and_state_by_name[name_or_number] = (blocks, group)
    return options_and_state_by_name, ["optimizer state was matched with the weights by shape"]
