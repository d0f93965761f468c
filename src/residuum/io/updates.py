"""Read and recognize updates: files that hold a gradient or a weight difference in place of weights.

A client of federated learning sends an update. It has the names and the shapes of the weights, so a reader
mistakes it for weights. An update is a sum of gradients at the training samples of the client:

    gradient     sum_i grad_theta loss(theta; x_i)
    difference   theta_after - theta_before, about minus the learning rate times a sum of gradients

Several signs tell updates from weights without data. A sum of few gradients has a rank far below that of
weights, which began as random numbers of full rank. The gradients of the cross-entropy add up to zero over
the classes. An update is much smaller than weights. Each sign alone also occurs in weights: in low-rank
networks, in heads that began at zero, and after strong weight decay. So two signs are needed. If the base is
known, an update does not correlate with the base and is much smaller. When in doubt, a file holds weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from residuum.errors import CheckpointError, InputError, ResiduumError
from residuum.io.adapters import WRAPPER_PREFIX
from residuum.io.checkpoints import as_network, load_checkpoint
from residuum.io.inert import Block
from residuum.io.release import Release
from residuum.io.release_weights import find_weights, flatten_blocks
from residuum.networks.network import Network
from residuum.records import Knowledge

GRADIENT, DIFFERENCE, ALONE = "gradient", "difference", "alone"
UPDATE_WORDS = re.compile(
    r"(^|[^a-z])(grads?|gradients?|deltas?|updates?|diffs?|differences?)([^a-z]|$)", re.IGNORECASE
)
GRADIENT_WORDS = re.compile(r"(^|[^a-z])(grads?|gradients?)([^a-z]|$)", re.IGNORECASE)
DIFFERENCE_WORDS = re.compile(r"(^|[^a-z])(deltas?|diffs?|differences?)([^a-z]|$)", re.IGNORECASE)
AFFIXES = re.compile(
    r"^((grads?|gradients?|deltas?|updates?|diffs?)[._/])+|([._](grads?|gradients?|deltas?|updates?|diffs?))+$",
    re.IGNORECASE,
)
# A sum over r samples has r large singular values. The next one must be smaller by at least this factor.
RANK_DROP = 1e3
MAX_RANK_SHARE = 0.75  # a sum of few gradients has a lower rank than this share of the full rank
SUM_TO_ZERO = (
    1e-4  # largest sum over classes, as a share of the sum of absolute values, that is rounding
)
# Trained weights of a layer with k inputs have a root mean square of about 1 / sqrt(k). If the root mean
# square in every layer is below MAX_GAIN / sqrt(k), the outputs hardly depend on the input. So the file holds
# an update.
MAX_GAIN = 0.05
MIN_CLASSES = 3  # the two outputs of a binary classifier can add up to zero for other reasons
# Weights before and after fine-tuning correlate, and their norms are similar. If the correlation and the
# ratio of norms are both below these limits, the file holds an update.
MIN_CORRELATION, MIN_RELATIVE_SIZE = 0.1, 0.5
MAX_MEASURED = 1 << 25  # largest number of weights of a layer whose rank is computed


@dataclass(frozen=True, eq=False)
class Update:
    """An update, and the network at whose weights its gradients are computed.

    Attributes:
        network: The base for a gradient, the base plus the update for a difference. If the base is not known,
            the weights of this network are the update itself.
        kind: "gradient", "difference" or "alone" (the base is not known).
        gradients: The update as a sum of gradients: the sign of a difference is changed.
        base: The weights before the update, None if they are not known.
    """

    network: Network
    kind: str
    gradients: dict[str, Tensor]
    base: dict[str, Tensor] | None = None

    def add_to(self, knowledge: Knowledge) -> Knowledge:
        """Return the attacker's knowledge with the update added, and the base weights if known."""
        has_initial_weights = self.kind == DIFFERENCE
        return knowledge.replace(
            moment=self.gradients,
            update=self.kind,
            theta0=self.base if has_initial_weights else None,
            provenance={
                name: source
                for name, source in knowledge.provenance.items()
                if name not in ("theta0", "moment", "update")
            }
            | {"moment": "release", "update": "release"},
        )


def resolve_update(
    update: Any, model: Any, base: Any, adapter: Any, kind: str = "auto"
) -> tuple[Any, Any, str]:
    """Return the model, the base and the setting ``update_kind`` of an audit of an update.

    Args:
        update: The update: a file, or tensors by name.
        model: The network before the update, or None.
        base: The network before the update, or None, if ``model`` is None.
        adapter: An adapter, which must be None.
        kind: The setting ``update_kind``.

    Returns:
        The update as the model to audit, the base or None, and the setting.

    Raises:
        InputError: If there are two bases, an adapter, or the setting says that the file holds weights.
    """
    if adapter is not None or (base is not None and model is not None) or kind == "none":
        option = "--base and a checkpoint" if adapter is None else "--adapter"
        option = "--update-kind none" if kind == "none" else option
        raise InputError(
            f"The options --update and {option} cannot be used together, because --base must name the "
            "network before the update.",
            "Run residuum audit --update FILE --base BASE.",
        )
    return update, base if model is None else model, "any" if kind == "auto" else kind


def read_update(
    source: Release | Mapping[str, Tensor],
    base: Network | None,
    kind: str = "auto",
    arch: str | None = None,
) -> Update:
    """Read an update.

    Args:
        source: The file, or the tensors by name.
        base: The network before the update, None if it is not known.
        kind: "gradient" or "difference". Any other text means to choose by the names in the file and by the
            last layer.
        arch: Architecture string, if there is no base and the file does not show the architecture.

    Returns:
        The update.

    Raises:
        CheckpointError: If the file does not fit the base, or if its numbers are not finite.
    """
    if base is None:
        network = _read_alone(source, arch)
        note = "the file holds a gradient or a weight difference, and the weights themselves are not known"
        network = network.replace(assumptions=(*network.assumptions, note))
        return Update(network, ALONE, dict(network.theta))
    tensors = _match_names(_read_tensors(source), base)
    if not all(bool(t.isfinite().all()) for t in tensors.values()):
        raise CheckpointError(
            "An update (a gradient or weight difference) must consist of finite "
            "numbers; this update contains NaN or infinite values.",
            "Compute the update again from finite weights or gradients, and save it.",
        )
    if kind not in (GRADIENT, DIFFERENCE):
        kind = _choose_kind(source, tensors)
    if kind == GRADIENT:
        note = "the file holds a gradient at the weights of the base"
        network = base.replace(assumptions=(*base.assumptions, note))
        return Update(network, GRADIENT, tensors, dict(base.theta))
    theta = dict(base.theta)
    for name, t in tensors.items():
        theta[name] = (theta[name].double() + t.double()).to(theta[name])
    note = "the file holds a weight difference, which was added to the base"
    network = base.replace(theta=theta, assumptions=(*base.assumptions, note))
    gradients = {name: -t for name, t in tensors.items()}
    return Update(network, DIFFERENCE, gradients, dict(base.theta))


def recognize_update(
    theta: Mapping[str, Tensor], file_name: str = "", base: Mapping[str, Tensor] | None = None
) -> tuple[str, ...]:
    """Return the signs that tensors are an update and not weights, () if they may be weights.

    Args:
        theta: The tensors, by name, in the order of the layers.
        file_name: Name of the file.
        base: The weights before the update, with the same names, None if they are not known.

    Returns:
        One sentence without a period for every sign.
    """
    if base is not None and (sign := compare_with_base(theta, base)):
        return (sign,)
    layers = _dense_layers(theta)
    if len(layers) < 2:
        # A linear model whose weights began at zero looks exactly like an update, so there is no evidence.
        return ()
    low_rank = _find_low_rank(layers[:-1])
    sums_to_zero = _adds_up_to_zero(*layers[-1])
    is_small = all(_gain(weight) < MAX_GAIN for weight, _ in layers)
    is_named = bool(UPDATE_WORDS.search(file_name))
    small_text = "all tensors are much smaller than weights, so that the outputs would be constant"
    signs = {
        "rank": low_rank,
        "sum": "the values of the last layer add up to zero over the classes"
        if sums_to_zero
        else "",
        "size": small_text if is_small else "",
        "name": f"the file is called {file_name[:80]!r}" if is_named else "",
    }
    present = {name: text for name, text in signs.items() if text}
    # The last layer of a model may have begun at zero. Then its rows add up to zero even after training, so
    # this sign and a name are not enough evidence.
    is_update = len(present) >= 2 and set(present) != {"sum", "name"}
    return tuple(present.values()) if is_update else ()


def compare_with_base(theta: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> str:
    """Return a sentence if the tensors are much smaller than the base and do not correlate with it.

    Args:
        theta: The tensors by name.
        base: The weights before the update by name.

    Returns:
        The sentence without a period, "" if the tensors may be weights that were trained from the base.
    """
    common_names = [
        n for n in base if n in theta and base[n].ndim > 1 and base[n].shape == theta[n].shape
    ]
    if not common_names:
        return ""
    values, base_values = (
        torch.cat([tensors[n].double().flatten() for n in common_names])
        for tensors in (theta, base)
    )
    norms = values.norm(), base_values.norm().clamp(min=1e-300)
    if not norms[0] > 0:
        return ""
    correlation = float(values @ base_values / (norms[0] * norms[1]))
    ratio = float(norms[0] / norms[1])
    if abs(correlation) >= MIN_CORRELATION or ratio >= MIN_RELATIVE_SIZE:
        return ""
    return (
        f"its correlation with the base is {correlation:.2f}, and its norm is {ratio:.2g} times that of the "
        "base"
    )


def _dense_layers(theta: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor | None]]:
    """Return weight (h outputs, d inputs) and bias of every layer. Kernels are reshaped to matrices."""
    return [
        (t.detach().flatten(1).double().cpu(), _bias_of(theta, name))
        for name, t in theta.items()
        if t.ndim > 1
    ]


def _bias_of(theta: Mapping[str, Tensor], name: str) -> Tensor | None:
    stem, dot, last = name.rpartition(".")
    bias = theta.get(f"{stem}{dot}{last.replace('weight', 'bias')}")
    is_bias = bias is not None and bias is not theta[name] and bias.ndim == 1
    return bias.detach().double().cpu() if is_bias and bias is not None else None


def _find_low_rank(layers: list[tuple[Tensor, Tensor | None]]) -> str:
    """Return a sentence if the rank of a layer is so low that it must be a sum over few samples.

    The bias of such a sum adds no rank to the weights. In a network of low rank, the bias does.
    """
    for weight, bias in layers:
        h, d = weight.shape
        full_rank = min(h, d)
        if bias is None or not bool(bias.any()) or full_rank < 4 or weight.numel() > MAX_MEASURED:
            continue
        with_bias = torch.cat([weight, bias[:, None]], 1)
        ranks = [_sharp_rank(matrix, d) for matrix in (weight, with_bias)]
        if 0 < ranks[1] <= MAX_RANK_SHARE * full_rank and ranks[0] == ranks[1]:
            return (
                f"a layer of {h} x {d} values has rank {ranks[1]} together with its bias, as a sum of "
                f"gradients at {ranks[1]} samples has"
            )
    return ""


def _sharp_rank(matrix: Tensor, d: int) -> int:
    """Return the number of singular values before a sharp drop to rounding, 0 if there is no drop.

    Rows of zeros (inactive or pruned neurons) and columns of zeros do not count as a drop, because a matrix
    of full rank has them as well after pruning.
    """
    matrix = matrix[matrix.abs().amax(1) > 0][:, matrix.abs().amax(0) > 0]
    if min(matrix.shape) < 4:
        return 0
    singular_values = torch.linalg.svdvals(matrix)
    singular_values = singular_values.clamp(min=float(1e-9 * singular_values[0]))
    ratios = singular_values[:-1] / singular_values[1:]
    rank = int(ratios.argmax()) + 1
    return (
        rank
        if float(ratios[rank - 1]) > RANK_DROP
        and float(singular_values[rank]) < 1e-5 * float(singular_values[0])
        else 0
    )


def _adds_up_to_zero(weight: Tensor, bias: Tensor | None) -> bool:
    """Return True if the gradients of a last layer add up to zero over the classes, as of cross-entropy."""
    if len(weight) < MIN_CLASSES or not bool(weight.any()):
        return False
    matrices = [weight] if bias is None else [weight, bias[:, None]]
    return all(
        float(m.sum(0).abs().sum()) <= SUM_TO_ZERO * float(m.abs().sum()) for m in matrices
    ) and all(bool(m.any()) for m in matrices)


def _gain(weight: Tensor) -> float:
    return float(weight.square().mean().sqrt()) * math.sqrt(weight.shape[1])


def _choose_kind(source: Any, tensors: Mapping[str, Tensor]) -> str:
    """Decide whether an update is a gradient or a weight difference, by names in the file or the last layer.

    The gradient of the last weights is, for each class, a sum of hidden activations, which ReLU makes
    nonnegative. Samples of another class have positive factors, their probabilities of the class. So the row
    of a class without samples is nonnegative in a gradient, and not positive in a difference. If every class
    has samples, the last bias decides: it is the sum of the probabilities of a class minus its number of
    samples. Few classes with many samples skew it to the left in a gradient.

    Returns:
        "gradient" or "difference".
    """
    if isinstance(source, Release):
        names_in_file = [source.path.stem, *_block_names(source)]
        if any(GRADIENT_WORDS.search(name) for name in names_in_file):
            return GRADIENT
        if any(DIFFERENCE_WORDS.search(name) for name in names_in_file):
            return DIFFERENCE
    matrices = [t for t in tensors.values() if t.ndim == 2 and len(t) >= MIN_CLASSES]
    if matrices:
        last_layer_rows = matrices[-1].double()
        # The factor allows for rounding errors of the sums.
        is_one_sign = last_layer_rows.sum(1).abs() >= (1 - 1e-9) * last_layer_rows.abs().sum(1)
        signs = last_layer_rows[is_one_sign].sum(1).sign().sum()
        if float(signs) != 0:
            return GRADIENT if float(signs) > 0 else DIFFERENCE
    vectors = [t for t in tensors.values() if t.ndim == 1 and len(t) >= MIN_CLASSES]
    if vectors:
        last_bias = vectors[-1].double() - vectors[-1].double().mean()
        return GRADIENT if float(last_bias.pow(3).sum()) < 0 else DIFFERENCE
    return DIFFERENCE


def _block_names(release: Release) -> list[str]:
    try:
        return [*flatten_blocks(find_weights(release))]
    except CheckpointError:
        return []


def _read_tensors(source: Release | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an update by name. A list of tensors gets the names of its positions."""
    if not isinstance(source, Release):
        return {name: t.detach() for name, t in source.items()}
    content = source.content
    if isinstance(content, list | tuple):
        blocks = {str(i): b for i, b in enumerate(content) if isinstance(b, Block)}
        if blocks:
            return {name: block.tensor() for name, block in blocks.items()}
    return {name: block.tensor() for name, block in flatten_blocks(find_weights(source)).items()}


def _match_names(tensors: Mapping[str, Tensor], base: Network) -> dict[str, Tensor]:
    """Return the tensors by the parameter names of the base: by equal names, or else in order by shape."""
    theta = base.theta
    by_clean_name = {_clean(name): t for name, t in tensors.items()}
    matched = {
        name: by_clean_name[clean]
        for name in theta
        if (clean := _clean(base.source_names.get(name, name))) in by_clean_name
        and by_clean_name[clean].shape == theta[name].shape
    }
    if not matched:
        floating = [t for t in tensors.values() if t.is_floating_point()]
        if [t.shape for t in floating] == [t.shape for t in theta.values()]:
            matched = dict(zip(theta, floating, strict=True))
    if not matched:
        raise CheckpointError(
            "The tensors of an update must have the names and shapes of the network before the update; "
            "the tensors of this update, such as {', '.join(sorted(tensors)[:3])[:80]}, do not.",
            "Save the update with the tensor names of the state dict. Or pass the network to which the "
            "update belongs with --base.",
        )
    # An update keeps its own dtype, which may be more precise than the dtype of the base.
    return {name: t.detach().cpu() for name, t in matched.items()}


def _clean(name: str) -> str:
    """Return the name of a tensor without prefixes of wrappers ("module.") and words such as "grad"."""
    return AFFIXES.sub("", WRAPPER_PREFIX.sub("", name.rpartition("/")[2]))


def _read_alone(source: Release | Mapping[str, Tensor], arch: str | None) -> Network:
    """Return an update without a known base as a network: its tensors take the place of the weights."""
    if not isinstance(source, Release):
        return as_network(dict(source), arch)
    try:
        return load_checkpoint(source, arch)
    except ResiduumError as problem:
        try:
            tensors = _read_tensors(source)
        except ResiduumError:
            raise problem from None
        if all(name.isdigit() for name in tensors):
            tensors = _name_layers(list(tensors.values()))
        return as_network({_clean(name): t for name, t in tensors.items()}, arch)


def _name_layers(tensors: list[Tensor]) -> dict[str, Tensor]:
    """Name the tensors of a list "0.weight", "0.bias", "1.weight" and so on, by their dimensions."""
    named, layer = {}, -1
    for before, t in pairwise([None, *tensors]):
        is_bias = t is not None and t.ndim == 1 and before is not None and before.ndim > 1
        layer += not is_bias
        named[f"{layer}.{'bias' if is_bias else 'weight'}"] = t
    return {name: t for name, t in named.items() if t is not None}
