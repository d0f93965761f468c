"""Check by running a network whether attacks apply to it, and measure its homogeneity.

Attacks differentiate a network twice, as a function of one sample and of the weights. This function may have
kinks, such as that of ReLU. A network is refused, with an error that states the reason, if

- its inputs are whole numbers,
- its outputs are not one row per sample,
- its forward method draws random numbers or changes its state,
- the outputs of a sample depend on other samples, or
- an operation has no second derivative.

The module also measures whether the outputs Phi(theta; x) are homogeneous in the weights theta:
Phi(c theta; x) = c^L Phi(theta; x) for all c > 0, with the order L.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from residuum.errors import ArchitectureError
from residuum.networks.activations import SigmoidReLU
from residuum.networks.kinds import dense_chain
from residuum.networks.surrogates import Kinks

# Outputs for different batch sizes count as equal if they differ by at most this share of the largest output.
# The limit for float32 is needed for Keras, which always computes in float32.
SAME = {torch.float64: 1e-9, torch.float32: 1e-4}
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


@dataclass(frozen=True)
class Probe:
    """Properties of a network that :func:`probe` measured by running it.

    Attributes:
        outputs: Number of outputs.
        is_flat: Whether the forward pass returns a vector (n,) of outputs instead of (n, 1).
        notes: Sentences about the network for readers of the results.
    """

    outputs: int
    is_flat: bool
    notes: tuple[str, ...]


def unwrap(model: nn.Module) -> nn.Module:
    """Remove PyTorch's wrappers for parallel training and compilation from a network."""
    while True:
        wrapped_module = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            wrapped_module = model.module
        if not isinstance(wrapped_module, nn.Module):
            return model
        model = wrapped_module


def probe(model: nn.Module, shape: tuple[int, ...]) -> Probe:
    """Run a network on random samples and check that attacks apply to it.

    The network runs in evaluation mode and in float64, as in most attacks.

    Args:
        model: The network, which does not change.
        shape: Shape of one sample.

    Returns:
        The number of outputs, whether the forward pass returns them as a vector, and notes.

    Raises:
        ArchitectureError: If attacks do not apply to the network.
    """
    class_name = type(model).__name__
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ArchitectureError(
            "Attacks must be able to replace the activation functions of a network; TorchScript hides the "
            f"activation functions of this {class_name}.",
            "Pass the Python module: net.load_state_dict(scripted.state_dict()). For a fully connected "
            "network, scripted.state_dict() alone is enough.",
        )
    model = copy.deepcopy(model).double()
    generator = torch.Generator().manual_seed(0)
    random_samples = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    state_before = {n: t.clone() for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    with (
        torch.no_grad(),
        second_derivatives(),
        _KinkOperators() as operators,
        Kinks(SigmoidReLU()) as kinks,
    ):
        outputs = _run(model, random_samples, shape)
        repeated_outputs, single_output = (
            _run(model, random_samples, shape),
            _run(model, random_samples[:1], shape),
        )
    output_rows = outputs[:, None] if outputs.ndim == 1 else outputs
    state_after = model.state_dict()
    if changed := [n for n, t in state_before.items() if not torch.equal(t, state_after[n])]:
        raise ArchitectureError(
            "The buffers of a network must not change in evaluation mode; the forward method of this "
            f"{class_name} changes {changed[0]!r}.",
            f"Change {changed[0]!r} only under `if self.training:`.",
        )
    if not torch.equal(outputs, repeated_outputs):
        raise ArchitectureError(
            "A network must return the same outputs for the same sample; the forward method of this "
            f"{class_name} draws random numbers in evaluation mode.",
            "Draw random numbers under `if self.training:`, or call F.dropout(x, training=self.training).",
        )
    largest_output = float(output_rows.abs().max()) or 1.0
    batch_difference = float((output_rows[0] - single_output.reshape(-1)).abs().max())
    if not batch_difference <= SAME.get(outputs.dtype, 1e-9) * largest_output:
        raise ArchitectureError(
            f"The outputs of a sample must depend on that sample only; the outputs of this {class_name} "
            "change with the other samples of the batch.",
            "If the network uses batch norm, set track_running_stats=True.",
        )
    _check_twice_differentiable(model, random_samples)
    kinks.unsmoothed.update(operators.seen - {*kinks.unsmoothed})
    return Probe(output_rows.shape[1], outputs.ndim == 1, tuple(_notes(model, kinks, output_rows)))


class _KinkOperators(TorchDispatchMode):
    """A context that records the names of the operators with kinks, such as ReLU, that run inside it.

    A graph from ``torch.export`` calls operators such as ``aten.relu`` instead of Python functions such as
    ``F.relu``. The context ``Kinks`` cannot replace these operators, because it intercepts Python functions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operator_name = func.overloadpacket.__name__.removesuffix("_").removesuffix("_with_indices")
        if operator_name in ("relu", "leaky_relu", "hardtanh", "max_pool2d", "max_pool3d"):
            self.seen.add(operator_name)
        return func(*args, **(kwargs or {}))


def _run(model: nn.Module, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the outputs (n, C) or (n,) of a network, or raise ``ArchitectureError`` with the reason."""
    class_name = type(model).__name__
    try:
        outputs = model(x)
    except Exception as problem:  # the forward method of the user's network may raise any exception
        if _runs(model, torch.zeros_like(x, dtype=torch.long)):
            raise ArchitectureError(
                "A sample must consist of real numbers, so that attacks can change it gradually; this "
                f"{class_name} takes whole numbers, such as tokens.",
                "Pass the layers after the embedding as a module, and the embedding's outputs as samples.",
            ) from problem
        if _runs(copy.deepcopy(model).float(), x.float()):
            raise ArchitectureError(
                f"A network must run in float64 and in float32; the forward method of this {class_name} "
                f"creates tensors of a fixed type, and PyTorch raised: "
                f"{str(problem).splitlines()[0][:200]}",
                "Create these tensors with the type of the input (x.new_zeros(...) or dtype=x.dtype), or "
                "register them as buffers.",
            ) from problem
        raise ArchitectureError(
            f"The network must accept samples of shape {shape}; the forward method of {class_name} raised: "
            f"{(str(problem) or type(problem).__name__).splitlines()[0][:200]}",
            "Pass the shape of one sample as the network receives it, or correct the data.",
        ) from problem
    if not isinstance(outputs, Tensor) or outputs.ndim not in (1, 2) or len(outputs) != len(x):
        actual_output = (
            tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        )
        raise ArchitectureError(
            f"A network must return a tensor of shape (n, outputs) for a batch of n samples; for {len(x)} "
            f"samples, this network returned {actual_output}.",
            "Pass a module whose forward returns one row of outputs per sample, such as the logits.",
        )
    if not outputs.isfinite().all():
        raise ArchitectureError(
            f"The outputs of a network must be finite; for random samples, this {class_name} returns "
            f"infinite or undefined outputs.",
            "Use a network whose training did not diverge.",
        )
    return outputs


def _runs(model: nn.Module, x: Tensor) -> bool:
    try:
        model(x)
    except Exception:  # noqa: BLE001  any exception means that the model does not run
        return False
    return True


def _check_twice_differentiable(model: nn.Module, x: Tensor) -> None:
    """Check that a network is twice differentiable: gradients in the weights have gradients in the sample."""
    class_name, x = type(model).__name__, x.detach().requires_grad_()
    differentiable_theta = {n: p.detach().requires_grad_() for n, p in model.named_parameters()}
    try:
        with torch.enable_grad(), second_derivatives(), Kinks(SigmoidReLU()):
            outputs = functional_call(model, differentiable_theta, (x,))
            if outputs.requires_grad:
                weight_gradients = torch.autograd.grad(
                    outputs.square().sum(),
                    list(differentiable_theta.values()),
                    create_graph=True,
                    materialize_grads=True,
                )
                squared_norm = torch.stack([term.square().sum() for term in weight_gradients]).sum()
                torch.autograd.grad(squared_norm, x, allow_unused=True)
            (slope,) = torch.autograd.grad(
                functional_call(model, differentiable_theta, (x,)).square().sum(),
                x,
                allow_unused=True,
            )
    except (RuntimeError, NotImplementedError) as problem:
        raise ArchitectureError(
            f"The outputs of a network must be twice differentiable; for this {class_name}, PyTorch "
            f"raised the error: {str(problem).splitlines()[0][:200]}",
            "Replace the operation that failed with operations that have second derivatives.",
        ) from problem
    if slope is None:
        raise ArchitectureError(
            f"The outputs of a network must be differentiable with respect to the sample; those of this "
            f"{class_name} are not.",
            "Remove `.detach()`, torch.no_grad() and rounding from the forward method.",
        )


def _notes(model: nn.Module, kinks: Kinks, outputs: Tensor) -> Iterator[str]:
    """Yield notes about a network for readers of the results.

    A note has at most 200 characters, because the notes are saved in the metadata of files.
    """
    if kinks.seen:
        yield f"attacks smooth these kinks: {', '.join(sorted(kinks.seen))}"
    if unsmoothed := sorted(name for name in kinks.unsmoothed if kinks.unsmoothed[name]):
        yield f"attacks do not smooth these kinks: {', '.join(unsmoothed)[:120]}"
    normalization_classes = Counter(
        type(m).__name__ for m in model.modules() if isinstance(m, _NormBase)
    )
    if normalization_classes:
        yield (
            f"{', '.join(sorted(normalization_classes))} uses running statistics here but used batch "
            "statistics in training, so the equations of attacks hold less exactly"
        )
    if any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules()):
        yield (
            "dropout was active in training and is not in evaluation, so the equations of attacks hold less "
            "exactly"
        )
    is_trainable = [p.requires_grad for p in model.parameters()]
    if any(is_trainable) and not all(is_trainable):
        yield (
            f"{is_trainable.count(False)} of {len(is_trainable)} parameters are frozen "
            "(requires_grad=False). Pass the initial weights with --init, so that attacks leave them out"
        )
    is_positive, row_sums = bool((outputs >= 0).all()), outputs.sum(1)
    sums_to_one = torch.allclose(row_sums, torch.ones_like(row_sums), atol=1e-4)
    if outputs.shape[1] > 1 and is_positive and sums_to_one:
        yield (
            "outputs are probabilities, and attacks compute margins and losses from them. Pass the module "
            "without its softmax to use the logits"
        )


@contextmanager
def second_derivatives() -> Iterator[None]:
    """Disable PyTorch's fused attention inside this context, because it has no second derivatives."""
    fastpath_was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath_was_enabled)


def add_output_dimension(module: nn.Module, inputs: tuple[Any, ...], outputs: Tensor) -> Tensor:
    """Reshape outputs from (n,) to (n, 1). This function is a forward hook.

    Args:
        module: The module of the hook, which is not used.
        inputs: The inputs of the module, which are not used.
        outputs: Outputs, (n,).

    Returns:
        The outputs, (n, 1).
    """
    return outputs[:, None]


# Factors by which the weights are multiplied to measure the order of homogeneity. The factors are close to 1,
# so that no output of a deep network overflows or underflows.
SCALES = (0.7, 0.9, 1.1, 1.4)
# A network is homogeneous if all estimates of the order agree up to this relative difference. In float64, the
# estimates of a homogeneous network agree to many more digits.
TOLERANCE = 1e-6


def homogeneity_order(model: nn.Module, x: Tensor) -> float | None:
    """Measure the order in which a network is homogeneous in its parameters.

    The outputs Phi are computed for the parameters theta and for the scaled parameters c theta. Every output
    that is not tiny gives an estimate log(Phi(c theta) / Phi(theta)) / log c of the order. The network is
    homogeneous if all estimates agree to 1e-6.

    Args:
        model: The network, which is evaluated in float64.
        x: Inputs of the network.

    Returns:
        The order, or None if the network is not homogeneous.
    """
    weights_by_name = {name: p.detach().double() for name, p in model.named_parameters()}
    unscaled_outputs = functional_call(model, weights_by_name, (x.double(),))
    is_not_tiny = unscaled_outputs.abs() > 1e-9 * unscaled_outputs.abs().max()
    if not is_not_tiny.any() or not torch.isfinite(unscaled_outputs).all():
        return None
    estimates_by_scale = []
    for c in SCALES:
        scaled_outputs = functional_call(
            model, {n: c * p for n, p in weights_by_name.items()}, (x.double(),)
        )
        output_ratios = scaled_outputs[is_not_tiny] / unscaled_outputs[is_not_tiny]
        if not (output_ratios > 0).all():
            return None
        estimates_by_scale.append(output_ratios.log() / math.log(c))
    estimates = torch.cat(estimates_by_scale)
    mean_order = float(estimates.mean())
    if float((estimates - mean_order).abs().max()) > TOLERANCE * max(1.0, abs(mean_order)):
        return None
    return (
        float(round(mean_order)) if abs(mean_order - round(mean_order)) < TOLERANCE else mean_order
    )


def probe_inputs(inputs: int, count: int = 8) -> Tensor:
    """Return fixed Gaussian inputs for measurements that need no data.

    Args:
        inputs: Number of values of an input.
        count: Number of inputs.

    Returns:
        Inputs (count, inputs) in float64.
    """
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, inputs, generator=generator, dtype=torch.float64)


def balance(model: nn.Module) -> float | None:
    """Measure how different the norms of incoming and outgoing weights of an MLP's neurons are.

    The result is sum_j |in_j - out_j| / sum_j max(in_j, out_j) over the hidden neurons j. The term in_j is
    the squared norm of the incoming weights and the bias of a neuron. The term out_j is the squared norm of
    its outgoing weights. Both norms are equal at every KKT point of the max-margin problem of a ReLU network.
    So a large value shows, without any data, that the weights are far from a KKT point or were rescaled.

    Args:
        model: Any network.

    Returns:
        A number between 0 (balanced) and 1, or None if the network is not an MLP with hidden neurons.
    """
    chain, gap, total = dense_chain(model), 0.0, 0.0
    for lower, upper in pairwise(chain.linears if chain else ()):
        squared_incoming = lower.weight.detach().double().square().sum(1)
        if lower.bias is not None:
            squared_incoming = squared_incoming + lower.bias.detach().double().square()
        squared_outgoing = upper.weight.detach().double().square().sum(0)
        gap += float((squared_incoming - squared_outgoing).abs().sum())
        total += float(torch.maximum(squared_incoming, squared_outgoing).sum())
    return gap / total if 0 < total < math.inf else None


def first_layer_inputs(model: Any) -> int | None:
    """Return the number of inputs of a live module whose first layer is dense, None for other models.

    A live module must be called to be read. This number says which columns of a table the module receives.

    Args:
        model: The model.

    Returns:
        The number of inputs.
    """
    if not isinstance(model, nn.Module):
        return None
    layers = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    return layers[0].in_features if layers and isinstance(layers[0], nn.Linear) else None
