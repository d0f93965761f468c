"""The one equation for any network with a forward, without a gradient per candidate.

    L = sum_l w_l || target_l - T_l ||^2,    T = sum_i grad_theta <u_i, Phi(theta; x_i)>

The gradient is linear in u, so T is one backward pass of the whole sum; the gradients in x and lam are
one more, through the first. No (m, P) Jacobian is formed. Where the graph of both would not fit into
the workspace, candidates go through in chunks, twice:

    first   T, summed over the chunks, each pass forgotten;  v_l = dL/dT_l = -2 w_l (target_l - T_l)
    then    dL = d <v, T>, a sum over candidates: each chunk's own

x: (R, m, *shape) for R runs; u: (m, C) from lam and the outputs; theta, target, v: by parameter name.
Runs go one after another on a CPU, where side by side they cost as much (``benchmarks/generic.py``),
and side by side by ``vmap`` on a GPU, which small networks leave idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, grad, vjp, vmap

from residuum.engine.explicit import Candidates, Covectors
from residuum.errors import ArchitectureError
from residuum.networks.probing import second_derivatives
from residuum.stationarity import Theta, layer_squares, parameters

WORKSPACE = 2 * 2**30  # bytes of one chunk, in the passes and their graphs
GRAPHS = 8  # times what a forward pass saves: it, the pass back, the pass through both, temporaries

Found = tuple[Tensor, Tensor, Tensor]  # squared residuals, gradient in x, gradient in lam


class GenericEquation:
    """The objective at one or several gradient points (theta, theta0), each of the same network.

    groups: names of the parameters of every layer.
    layer_weights: w_l.
    workspace: bytes that a chunk of candidates may take.
    side_by_side: whether runs share their passes.
    """

    def __init__(
        self,
        points: Sequence[nn.Module],
        target: Theta,
        groups: Sequence[Sequence[str]],
        layer_weights: Tensor,
        workspace: int = WORKSPACE,
    ) -> None:
        self.target, self.groups, self.weights = target, groups, layer_weights
        self.workspace, self.saved = workspace, 0
        self.thetas = [parameters(point) for point in points]
        self.side_by_side = layer_weights.is_cuda
        # cuDNN has no second derivatives of recurrent layers; PyTorch's own kernels have.
        self.recurrent = any(isinstance(part, nn.RNNBase) for part in points[0].modules())

    def evaluate(self, models: Sequence[nn.Module], objective: Covectors, at: Candidates) -> Found:
        """(R, L) squared residuals of the layers, and the gradients of each run's L in x and lam.

        models: the points, each with the surrogate that this evaluation has.
        at: with x (R, m, *shape).
        """
        runs, m = at.x.shape[:2]
        own = torch.backends.cudnn.flags(enabled=False) if self.recurrent else nullcontext()
        with second_derivatives(), own:
            room = self._room(models[0], at.x[0, :1])
            if self.side_by_side and runs > 1 and runs * m <= room:
                try:
                    return self._side_by_side(models, objective, at)
                except (RuntimeError, ValueError):  # a forward that vmap cannot transform
                    self.side_by_side = False
            found = [self._one(models, objective, at.of_run(r), room) for r in range(runs)]
        parts, gx, gl = (torch.stack(each) for each in zip(*found, strict=True))
        return parts, gx, gl

    @torch.enable_grad()
    def _one(
        self, models: Sequence[nn.Module], objective: Covectors, at: Candidates, room: int
    ) -> Found:
        """One run: x (m, *shape), in chunks of ``room`` candidates.

        All at once the residual is one graph, and its gradient one pass through it. In chunks T is
        summed first without a graph; then, with v = dL/dT held fixed, <v, T(chunk)> has the same
        derivatives in the chunk's candidates as L has, so that every chunk is passed twice and no graph
        outlives its chunk.
        """
        x, lam, labels = at.x.detach().requires_grad_(), at.lam.detach().requires_grad_(), at.labels

        def total(rows: slice, keep: bool) -> Theta:
            """T of these candidates; keep: differentiable in x and lam."""
            parts: Theta = {}
            for k, (model, theta) in enumerate(zip(models, self.thetas, strict=True)):
                leaves = {name: t.detach().requires_grad_() for name, t in theta.items()}
                here = x[rows] if keep else x[rows].detach()
                outputs = functional_call(model, leaves, (here,))
                # u follows the outputs in x; in theta it is not differentiated.
                u = objective.covectors(k, outputs, labels[rows], lam[rows])
                terms = torch.autograd.grad(
                    outputs,
                    list(leaves.values()),
                    u if keep else u.detach(),
                    create_graph=keep,
                    materialize_grads=True,
                )
                for name, term in zip(leaves, terms, strict=True):
                    parts[name] = parts[name] + term if name in parts else term
            return parts

        def gradients(of: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(of, (x, lam), allow_unused=True, materialize_grads=True)

        chunks = [slice(start, start + room) for start in range(0, len(x), room)]
        if len(chunks) == 1:
            whole = total(chunks[0], True)
            left = {name: t - whole[name] for name, t in self.target.items()}
            parts = layer_squares(left, self.groups)
            gx, gl = gradients(parts @ self.weights)
            return parts.detach(), gx, gl
        left = dict(self.target)
        for rows in chunks:
            for name, term in total(rows, False).items():
                left[name] = left[name] - term
        scales = zip(self.groups, self.weights.unbind(), strict=True)
        v = {name: -2 * weight * left[name] for names, weight in scales for name in names}
        gx, gl = torch.zeros_like(x), torch.zeros_like(lam)
        for rows in chunks:
            inner = torch.stack([(v[n] * t).sum() for n, t in total(rows, True).items()]).sum()
            own = gradients(inner)
            gx[rows], gl[rows] = own[0][rows], own[1][rows]
        return layer_squares(left, self.groups), gx, gl

    def _side_by_side(
        self, models: Sequence[nn.Module], objective: Covectors, at: Candidates
    ) -> Found:
        """All runs in one pass by ``vmap``; the same as one after another.

        Many small kernels are what a step of a small network costs on a GPU: R runs then cost hardly
        more than one. theta is shared, x, lam and, where runs have their own, labels are mapped.
        """

        def one(x: Tensor, lam: Tensor, labels: Tensor) -> Found:
            def loss(x: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
                left = dict(self.target)
                for k, (model, theta) in enumerate(zip(models, self.thetas, strict=True)):
                    outputs, pull, *_ = vjp(partial(_outputs, model, x), theta)
                    (terms,) = pull(objective.covectors(k, outputs, labels, lam))
                    left = {name: t - terms[name] for name, t in left.items()}
                parts = layer_squares(left, self.groups)
                return parts @ self.weights, parts

            (gx, gl), parts = grad(loss, argnums=(0, 1), has_aux=True)(x, lam)
            return parts, gx, gl

        every = vmap(one, in_dims=(0, 0, None if at.labels.ndim == 1 else 0))
        return every(at.x, at.lam, at.labels)

    def workspace_of(self, candidates: int) -> int:
        """Bytes that the passes of an evaluation take, as estimated; known after the first one."""
        once = GRAPHS * self.saved
        return min(candidates * once, max(once, self.workspace))

    def _room(self, model: nn.Module, x: Tensor) -> int:
        """Candidates of one chunk; what a forward pass saves is measured once, on one and two samples.

        That is the first time that it runs on this device and in these numbers.
        """
        if not self.saved:
            try:
                one, two = (
                    saved_bytes(model, self.thetas[0], x.expand(n, *x.shape[1:])) for n in (1, 2)
                )
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as problem:  # a tensor that a forward makes, or keeps, elsewhere
                raise ArchitectureError(
                    f"The network must run on {x.device.type} in {str(x.dtype).removeprefix('torch.')}; its "
                    f"forward says: {str(problem).splitlines()[0][:200]}",
                    "Register the tensors it keeps as buffers and make others like its input, or use "
                    "--device cpu.",
                ) from problem
            self.saved = max(1, two - one)  # what does not grow with samples are weights
        return max(1, self.workspace // (GRAPHS * self.saved))


def _outputs(model: nn.Module, x: Tensor, theta: Theta) -> Tensor:
    return functional_call(model, theta, (x,))


@torch.enable_grad()
def saved_bytes(model: nn.Module, theta: Theta, x: Tensor) -> int:
    """What a forward pass keeps for the backward pass."""
    found = 0

    def count(t: Tensor) -> Tensor:
        nonlocal found
        found += t.numel() * t.element_size()
        return t

    leaves = {name: t.detach().requires_grad_() for name, t in theta.items()}
    with saved_tensors_hooks(count, lambda t: t):
        functional_call(model, leaves, (x.detach(),))
    return found
