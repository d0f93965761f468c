"""What a network of anybody's is, found by running it: two samples, forwards and derivatives.

Attacks and certificates take a network to be a function of one sample and its weights, twice
differentiable but at kinks. Whatever breaks that is found here, before anything rests on it, and
refused with the reason: whole numbers for inputs, outputs that are no rows, random numbers or memory in
a forward, samples that see each other, operations without second derivatives.

Measured likewise, at weights scaled by c: is Phi(c theta; x) = c^L Phi(theta; x), and with which L?
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

# Rounding between batches of other sizes, as a share of the largest output. Keras computes in float32
# whatever it is given.
SAME = {torch.float64: 1e-9, torch.float32: 1e-4}
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


@dataclass(frozen=True)
class Probe:
    """outputs: of one sample; flat: whether the forward returns them as (n,); notes: what a reader of
    the result must know.
    """

    outputs: int
    flat: bool
    notes: tuple[str, ...]


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside what PyTorch wraps around it to train in parallel or to compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def probe(model: nn.Module, shape: tuple[int, ...]) -> Probe:
    """Run a network in evaluation mode on samples of ``shape``, in float64 as certificates and most attacks
    do; refused with what is in the way.
    """
    name = type(model).__name__
    if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        raise ArchitectureError(
            f"The kinks of a network must be seen while it runs; TorchScript hides those of this {name}.",
            "Give the Python module: net.load_state_dict(scripted.state_dict()); of a fully connected "
            "network scripted.state_dict() alone is enough.",
        )
    model = copy.deepcopy(model).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    before = {n: t.clone() for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    with torch.no_grad(), second_derivatives(), _Hidden() as hidden, Kinks(SigmoidReLU()) as kinks:
        outputs = _run(model, x, shape)
        again, alone = _run(model, x, shape), _run(model, x[:1], shape)
    rows = outputs[:, None] if outputs.ndim == 1 else outputs
    after = model.state_dict()
    if changed := [n for n, t in before.items() if not torch.equal(t, after[n])]:
        raise ArchitectureError(
            f"A network must leave its state as it is in evaluation mode; the forward of this {name} "
            f"changes {changed[0]!r}.",
            "Update such state under `if self.training:`.",
        )
    if not torch.equal(outputs, again):
        raise ArchitectureError(
            f"A network must give the same outputs for the same sample; the forward of this {name} draws "
            "random numbers in evaluation mode.",
            "Draw them under `if self.training:`; call F.dropout(x, training=self.training).",
        )
    size = float(rows.abs().max()) or 1.0
    if not float((rows[0] - alone.reshape(-1)).abs().max()) <= SAME.get(outputs.dtype, 1e-9) * size:
        raise ArchitectureError(
            f"A sample's outputs must depend on that sample alone; those of this {name} change with the "
            "samples beside it.",
            "Batch norm needs running statistics: track_running_stats=True.",
        )
    _twice_differentiable(model, x)
    kinks.left.update(hidden.seen - {*kinks.left})
    return Probe(rows.shape[1], outputs.ndim == 1, tuple(_notes(model, kinks, rows)))


class _Hidden(TorchDispatchMode):
    """Kinks that run all the same: in a graph that was exported no function is called by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__.removesuffix("_").removesuffix("_with_indices")
        if name in ("relu", "leaky_relu", "hardtanh", "max_pool2d", "max_pool3d"):
            self.seen.add(name)
        return func(*args, **(kwargs or {}))


def _run(model: nn.Module, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Outputs, (n, C) or (n,)."""
    name = type(model).__name__
    try:
        outputs = model(x)
    except Exception as problem:  # a forward of somebody's own may raise anything
        if _runs(model, torch.zeros_like(x, dtype=torch.long)):
            raise ArchitectureError(
                f"A sample is made of real numbers, which candidates are moved along; this {name} takes "
                "whole numbers, such as tokens.",
                "Give the part behind the embedding as a module: its samples are embedded sequences.",
            ) from problem
        if _runs(copy.deepcopy(model).float(), x.float()):
            raise ArchitectureError(
                f"A network must run in float64 as in float32; the forward of this {name} makes tensors of "
                f"one type: {str(problem).splitlines()[0][:200]}",
                "Make them like its input, with x.new_zeros(...) or dtype=x.dtype, or register them as "
                "buffers.",
            ) from problem
        raise ArchitectureError(
            f"The network must take samples of shape {shape}; the forward of {name} says: "
            f"{(str(problem) or type(problem).__name__).splitlines()[0][:200]}",
            "Grant the shape of one sample as the network receives it, or correct the data.",
        ) from problem
    if not isinstance(outputs, Tensor) or outputs.ndim not in (1, 2) or len(outputs) != len(x):
        got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ArchitectureError(
            f"A network returns (n, outputs); for {len(x)} samples this one returned {got}.",
            "Give a module whose forward returns one row of outputs per sample, such as the logits.",
        )
    if not outputs.isfinite().all():
        raise ArchitectureError(
            f"Outputs must be finite; those of this {name} for random samples are not.",
            "Use a network whose training did not diverge.",
        )
    return outputs


def _runs(model: nn.Module, x: Tensor) -> bool:
    try:
        model(x)
    except Exception:  # noqa: BLE001  whatever it raises, it does not
        return False
    return True


def _twice_differentiable(model: nn.Module, x: Tensor) -> None:
    """A gradient in the weights, and its gradient in the sample, as every attack takes them."""
    name, x = type(model).__name__, x.detach().requires_grad_()
    leaves = {n: p.detach().requires_grad_() for n, p in model.named_parameters()}
    try:
        with torch.enable_grad(), second_derivatives(), Kinks(SigmoidReLU()):
            outputs = functional_call(model, leaves, (x,))
            if outputs.requires_grad:
                terms = torch.autograd.grad(
                    outputs.square().sum(),
                    list(leaves.values()),
                    create_graph=True,
                    materialize_grads=True,
                )
                total = torch.stack([term.square().sum() for term in terms]).sum()
                torch.autograd.grad(total, x, allow_unused=True)
            (slope,) = torch.autograd.grad(
                functional_call(model, leaves, (x,)).square().sum(), x, allow_unused=True
            )
    except (RuntimeError, NotImplementedError) as problem:
        raise ArchitectureError(
            f"Attacks differentiate a network twice; for this {name} torch says: "
            f"{str(problem).splitlines()[0][:200]}",
            "Write that operation with others that have second derivatives.",
        ) from problem
    if slope is None:
        raise ArchitectureError(
            f"A network's outputs must change with its samples; those of this {name} have no gradient there.",
            "Remove `.detach()`, torch.no_grad() and rounding from its forward.",
        )


def _notes(model: nn.Module, kinks: Kinks, outputs: Tensor) -> Iterator[str]:
    """One sentence each; at most as long as what a file may say of itself."""
    if kinks.seen:
        yield f"kinks are smoothed in attacks, wherever called: {', '.join(sorted(kinks.seen))}"
    if left := sorted(name for name in kinks.left if kinks.left[name]):
        yield f"kinks without a surrogate stay as they are: {', '.join(left)[:120]}"
    parts = Counter(type(part).__name__ for part in model.modules() if isinstance(part, _NormBase))
    if parts:
        yield (
            f"{', '.join(sorted(parts))}: the affine map of evaluation; training saw the statistics of "
            "batches, so the equations hold less exactly"
        )
    if any(isinstance(part, _DropoutNd) and part.p > 0 for part in model.modules()):
        yield "dropout does nothing in evaluation; training had it, so the equations hold less exactly"
    moving = [p.requires_grad for p in model.parameters()]
    if any(moving) and not all(moving):
        yield (
            f"{moving.count(False)} of {len(moving)} parameters are frozen (requires_grad=False); to have "
            "them left out of what must be explained, grant the start (--init)"
        )
    positive, sums = bool((outputs >= 0).all()), outputs.sum(1)
    if outputs.shape[1] > 1 and positive and torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
        yield (
            "outputs are probabilities: margins and losses are taken of them as they are; give the module "
            "without its softmax to have those of its logits"
        )


@contextmanager
def second_derivatives() -> Iterator[None]:
    """Kernels whose second derivatives torch has: those of fused attention have none."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def as_rows(_: nn.Module, __: tuple[Any, ...], outputs: Tensor) -> Tensor:
    """A forward hook: outputs (n,) become (n, 1)."""
    return outputs[:, None]


# Both sides of 1, near enough that no output over- or underflows at the order of a deep network.
SCALES = (0.7, 0.9, 1.1, 1.4)
TOLERANCE = 1e-6  # of the order: float64 outputs of a homogeneous network agree to far more digits


def homogeneity_order(model: nn.Module, x: Tensor) -> float | None:
    """The order L, or None when the network is not homogeneous in its parameters.

    For every scale c and every output that is not tiny, L = log(Phi(c theta) / Phi(theta)) / log c;
    homogeneous means that all of them agree to 1e-6. Float64 whatever the model's dtype.
    """
    theta = {name: p.detach().double() for name, p in model.named_parameters()}
    base = functional_call(model, theta, (x.double(),))
    usable = base.abs() > 1e-9 * base.abs().max()
    if not usable.any() or not torch.isfinite(base).all():
        return None
    orders = []
    for c in SCALES:
        scaled = functional_call(model, {n: c * p for n, p in theta.items()}, (x.double(),))
        ratio = scaled[usable] / base[usable]
        if not (ratio > 0).all():
            return None
        orders.append(ratio.log() / math.log(c))
    found = torch.cat(orders)
    order = float(found.mean())
    if float((found - order).abs().max()) > TOLERANCE * max(1.0, abs(order)):
        return None
    return float(round(order)) if abs(order - round(order)) < TOLERANCE else order


def probe_inputs(inputs: int, count: int = 8) -> Tensor:
    """Fixed Gaussian inputs for measurements that need no data."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, inputs, generator=generator, dtype=torch.float64)


def balance(model: nn.Module) -> float | None:
    """sum_j |in_j - out_j| / sum_j max(in_j, out_j) over the hidden neurons of an MLP, else None.

    in_j = ||w_j||^2 + b_j^2 and out_j = ||v_j||^2 are a neuron's incoming and outgoing squared norm.
    They are equal at every KKT point of a ReLU network, so this is a data-free sign of distance from
    one, and of weights that were rewritten after training.
    """
    chain, gap, total = dense_chain(model), 0.0, 0.0
    for lower, upper in pairwise(chain.linears if chain else ()):
        incoming = lower.weight.detach().double().square().sum(1)
        if lower.bias is not None:
            incoming = incoming + lower.bias.detach().double().square()
        outgoing = upper.weight.detach().double().square().sum(0)
        gap += float((incoming - outgoing).abs().sum())
        total += float(torch.maximum(incoming, outgoing).sum())
    return gap / total if 0 < total < math.inf else None
