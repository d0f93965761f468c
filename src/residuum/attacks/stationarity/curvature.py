"""The splitting matrix of every candidate and its smallest eigenvalue (Shen et al. 2026, section 5).

The splitting matrix of candidate x_i is

    S(x_i) = -2 sum_p w_p r_p Hess_x f_p(x_i),     f(x_i) = grad_theta <u_i, Phi(theta; x_i)>

Phi is the network with weights theta, and the index p runs over these weights. The residual r = target -
sum_i f(x_i) is held fixed, and w_p is the weight of the layer of p in the loss. The vector u_i contains the
multiplier of the candidate (``objectives.py``), so the formula has no separate multiplier. If the outputs of
the network decide the multipliers, f includes this dependence on x_i. The classes that compete with the label
of a candidate are held fixed.

The Hessian of the loss in all candidates is S plus the square 2 |sum_i f'(x_i)[v_i]|^2. S can therefore have
negative eigenvalues although the Hessian has none.

S is never formed. For MLPs, a product S v is a forward-mode derivative of the engine's gradient. For any
other network, it is a third-order automatic derivative. The Lanczos method finds the smallest eigenpairs of
all candidates at once. Shapes: x and v are (R, m, *shape), and lam is (R, m, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd import forward_ad

from residuum.attacks.stationarity.problem import Problem
from residuum.engine.explicit import Candidates

# Number of steps of the Lanczos method. They suffice to find a negative eigenvalue, but not for exact
# eigenvalues.
ITERATIONS = 20
Product = Callable[[Tensor], Tensor]


class Curvature:
    """Second derivatives of the loss in the candidates, as products of matrices with vectors.

    Each candidate has a splitting matrix S, which decides whether splitting the candidate in two lowers the
    loss (formula above). The methods multiply vectors by the splitting matrices of all candidates, or by
    the Hessian of the loss, at one point (x, lam). The constructor computes the residual of the attacked
    equation at this point.

    Args:
        problem: The loss of the attack as a function of candidates and multipliers (weights of candidates).
        x: Candidates for training samples (R, m, *shape), m in each of R runs.
        lam: Multipliers (weights) of the candidates (R, m, ...), as they appear in the equation.
        sharpness: Sharpness of the smooth surrogate of the ReLU (alpha of the sigmoid, beta of the
            softplus).
    """

    def __init__(self, problem: Problem, x: Tensor, lam: Tensor, sharpness: float | Tensor) -> None:
        self.problem, self.x, self.lam, self.sharpness = problem, x, lam, sharpness
        if (equation := problem.explicit) is None:
            self.residuals = [self._residual(run) for run in range(len(x))]
            return
        self.activation = problem.activation(sharpness)
        with torch.no_grad():
            candidates = problem.candidates(x, lam)
            self.errors = equation.compute_errors(candidates, problem.objective, self.activation)

    def multiply_splitting(self, v: Tensor, rows: slice = slice(None)) -> Tensor:
        """Multiply the splitting matrix S(x_i) of each candidate x_i by a vector v_i.

        The splitting matrix says whether splitting the candidate in two lowers the loss.

        Args:
            v: Vectors v_i with the shape of x[:, rows].
            rows: Slice of the candidates whose splitting matrices multiply the vectors.

        Returns:
            The products S(x_i) v_i, with the shape of v.
        """
        if (equation := self.problem.explicit) is None:
            return torch.stack(
                [self._split_generic(run, vectors, rows) for run, vectors in enumerate(v)]
            )
        candidates, objective = (
            self.problem.candidates(self.x, self.lam)[rows],
            self.problem.objective,
        )

        def gradient(dual: Candidates) -> Tensor:
            return equation.pull_back(dual, self.errors, objective, self.activation)[0]

        return _derivative_along(v, gradient, candidates)

    def multiply_hessian(self, v: Tensor) -> Tensor:
        """Multiply the Hessian of the loss, as a function of all candidates, by a vector v."""
        if (equation := self.problem.explicit) is None:
            return torch.stack([self._full_generic(run, vectors) for run, vectors in enumerate(v)])
        candidates, objective = self.problem.candidates(self.x, self.lam), self.problem.objective

        def gradient(dual: Candidates) -> Tensor:
            return equation.evaluate(dual, objective, self.activation, False)[1]

        return _derivative_along(v, gradient, candidates)

    def sum_of_gradients(
        self, run: int, x: Tensor, lam: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Compute the weighted sum of the gradients at all candidates of a run, by automatic differentiation.

        Args:
            run: Index of the run (restart).
            x: Candidates (m, *shape) of one run.
            lam: Multipliers (weights) of the candidates (m, ...), as they appear in the equation.
            labels: Labels of the candidates (m,).

        Returns:
            The sum of gradients by parameter name.
        """
        total: dict[str, Tensor] = {}
        for i, model in enumerate(self.problem.build_models(self.sharpness, run)):
            for name, term in self.problem.sum_of_gradients(model, i, x, lam, labels).items():
                total[name] = total[name] + term if name in total else term
        return total

    def _residual_at(self, run: int, x: Tensor) -> dict[str, Tensor]:
        problem, models = self.problem, self.problem.build_models(self.sharpness, run)
        return problem.residual(models, x, self.lam[run].detach(), problem.labels_of(run))

    @torch.enable_grad()
    def _residual(self, run: int) -> dict[str, Tensor]:
        """Return the derivative of the loss with respect to the sum of gradients, by parameter name.

        The derivative is -2 times the residual of the run times the weight of the layer in the loss.

        Args:
            run: Index of the run (restart).

        Returns:
            The derivative by parameter name.
        """
        residual = self._residual_at(run, self.x[run].detach())
        weighted_groups = zip(self.problem.groups.values(), self.problem.layer_weights, strict=True)
        return {
            name: (-2 * w * residual[name]).detach()
            for names, w in weighted_groups
            for name in names
        }

    @torch.enable_grad()
    def _split_generic(self, run: int, v: Tensor, rows: slice) -> Tensor:
        run_x = self.x[run, rows].detach().requires_grad_()
        gradient_sum = self.sum_of_gradients(
            run, run_x, self.lam[run, rows].detach(), self.problem.labels_of(run)[rows]
        )
        return _hessian_product(inner_product(self.residuals[run], gradient_sum), run_x, v)

    @torch.enable_grad()
    def _full_generic(self, run: int, v: Tensor) -> Tensor:
        run_x = self.x[run].detach().requires_grad_()
        return _hessian_product(
            self.problem.squares(self._residual_at(run, run_x)) @ self.problem.weights, run_x, v
        )


def weighted_residuals(
    problem: Problem, x: Tensor, lam: Tensor, sharpness: float | Tensor
) -> Tensor:
    """Compute the error of the attacked equation, weighted so that its squared norm is the loss.

    The residual in each layer is multiplied by the square root of the weight of this layer in the loss.

    Args:
        problem: The loss of the attack as a function of candidates and multipliers (weights of candidates).
        x: Candidates for training samples (R, m, *shape), m in each of R runs.
        lam: Multipliers (weights) of the candidates (R, m, ...), as they appear in the equation.
        sharpness: Sharpness of the smooth surrogate of the ReLU (alpha of the sigmoid, beta of the
            softplus).

    Returns:
        The weighted residual of every run (R, P), for P weights of the network.
    """
    curvature = Curvature(problem, x, lam, sharpness)
    weighted_blocks = []
    weighted_groups = zip(problem.groups.values(), problem.layer_weights, strict=True)
    for i, (names, w) in enumerate(weighted_groups):
        if w == 0:
            continue
        if problem.explicit is not None:
            run_residual = curvature.errors[i]
            assert run_residual is not None
            layer_residuals = [t for t in run_residual if t is not None]
        else:
            layer_residuals = [torch.stack([r[n] for r in curvature.residuals]) for n in names]
        weighted_blocks += [t.flatten(1) / (-2 * w**0.5) for t in layer_residuals]
    return torch.cat(weighted_blocks, 1)


def _hessian_product(value: Tensor, x: Tensor, v: Tensor) -> Tensor:
    """Return the product of v with the Hessian of the scalar ``value`` in x, by automatic differentiation.

    Args:
        value: Scalar that was computed from x.
        x: Tensor of variables.
        v: Vector with the shape of x.

    Returns:
        The product with the shape of x. If ``value`` is linear in x, the product is zero.
    """
    (gradient,) = torch.autograd.grad(value, x, create_graph=True, materialize_grads=True)
    if not gradient.requires_grad:
        return torch.zeros_like(x)
    (product,) = torch.autograd.grad(gradient, x, v, allow_unused=True)
    return torch.zeros_like(x) if product is None else product


def inner_product(a: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
    """Compute the inner product of two dictionaries of tensors, over the names of ``b``.

    Args:
        a: Tensors by name, with at least the names of ``b``.
        b: Tensors by name.

    Returns:
        The inner product.
    """
    return torch.stack([(a[name] * b[name]).sum() for name in b]).sum()


def _derivative_along(
    v: Tensor, gradient: Callable[[Candidates], Tensor], candidates: Candidates
) -> Tensor:
    """Compute the derivative of a gradient along a direction, by forward-mode differentiation.

    Args:
        v: Direction with the shape of the candidates x.
        gradient: Function that computes the gradient of the loss from the candidates.
        candidates: Candidates at which the gradient is differentiated.

    Returns:
        The product of the second derivative with v.
    """
    # PyTorch runs the derivative rule of the ReLU's surrogate only if gradients are enabled, although no
    # tensor here requires a gradient.
    with torch.enable_grad(), forward_ad.dual_level():
        dual_candidates = replace(candidates, x=forward_ad.make_dual(candidates.x, v.flatten(2)))
        tangent = forward_ad.unpack_dual(gradient(dual_candidates)).tangent
    return torch.zeros_like(v) if tangent is None else tangent.view_as(v)


@dataclass(frozen=True)
class LowestPairs:
    """Smallest eigenvalue and its eigenvector of a matrix of each candidate (the splitting matrix).

    If the eigenvalue is negative, splitting the candidate along the eigenvector lowers the loss.

    Attributes:
        values: Smallest eigenvalues (R, m) of m candidates in R runs.
        vectors: Unit eigenvectors with the shape of the candidates.
    """

    values: Tensor
    vectors: Tensor


def find_lowest_pairs(
    curvature: Curvature,
    start: Tensor,
    free: Tensor | None = None,
    iterations: int = ITERATIONS,
    workspace: int = 2**31,
) -> LowestPairs:
    """Find the smallest eigenvalue, with eigenvector, of each candidate's splitting matrix.

    The splitting matrix decides whether splitting a candidate in two lowers the loss. The function handles
    chunks of candidates to limit the memory.

    Args:
        curvature: Multiplies the splitting matrices by vectors.
        start: Random start vectors of the Lanczos method, with the shape of the candidates x.
        free: 1 for coordinates of candidates that can increase and decrease, 0 for coordinates at a bound,
            with the shape of x. None if there are no bounds.
        iterations: Number of steps of the Lanczos method.
        workspace: Memory in bytes that the vectors of a chunk may take.

    Returns:
        The smallest eigenvalues and their eigenvectors.
    """
    candidates = curvature.x
    candidate_bytes = (
        candidates.element_size() * len(candidates) * (iterations + 8) * candidates[0, 0].numel()
    )
    mlp_equation = curvature.problem.explicit
    if mlp_equation is not None:
        candidate_bytes += (
            30
            * candidates.element_size()
            * len(candidates)
            * sum(mlp_equation.widths[1:])
            * len(mlp_equation.points)
        )
    chunk_size = max(1, workspace // candidate_bytes)
    values, vectors = [], []
    for i in range(0, candidates.shape[1], chunk_size):
        chunk = slice(i, min(i + chunk_size, candidates.shape[1]))
        is_free = candidates.new_ones(()) if free is None else free[:, chunk]

        def product(v: Tensor, chunk: slice = chunk, is_free: Tensor = is_free) -> Tensor:
            return (
                curvature.multiply_splitting(v.view_as(candidates[:, chunk]) * is_free, chunk)
                * is_free
            ).flatten(2)

        value, vector = lanczos(product, (start[:, chunk] * is_free).flatten(2), iterations)
        values.append(value)
        vectors.append(vector.view_as(candidates[:, chunk]))
    return LowestPairs(torch.cat(values, 1), torch.cat(vectors, 1))


def lanczos(product: Product, start: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Find the smallest eigenvalue and eigenvector of each of several symmetric operators (Lanczos method).

    Every vector is orthogonalized twice against all earlier vectors. If a Krylov space is exhausted early,
    the remaining Lanczos vectors are zero. To keep these zero vectors out of the smallest eigenpair, the
    function gives them large diagonal entries in the tridiagonal matrix.

    Args:
        product: Multiplies each operator by its vector, for vectors (..., d).
        start: Start vectors (..., d).
        iterations: Number of steps of the Lanczos method.

    Returns:
        The smallest eigenvalues (...) and unit eigenvectors (..., d).
    """
    iterations = min(iterations, start.shape[-1])
    zero_threshold = torch.finfo(start.dtype).eps ** 0.75
    lanczos_vector = start / start.norm(dim=-1, keepdim=True).clamp(
        min=torch.finfo(start.dtype).tiny
    )
    lanczos_basis = start.new_zeros(*start.shape[:-1], iterations, start.shape[-1])
    diagonal = start.new_zeros(*start.shape[:-1], iterations)
    off_diagonal = torch.zeros_like(diagonal)
    largest_entry = start.new_zeros(start.shape[:-1])
    for j in range(iterations):
        lanczos_basis[..., j, :] = lanczos_vector
        new_vector = product(lanczos_vector)
        diagonal[..., j] = (new_vector * lanczos_vector).sum(-1)
        earlier_vectors = lanczos_basis[..., : j + 1, :]
        for _ in range(2):
            new_vector = new_vector - (
                (earlier_vectors @ new_vector[..., None]) * earlier_vectors
            ).sum(-2)
        beta = new_vector.norm(dim=-1)
        largest_entry = torch.maximum(largest_entry, torch.maximum(diagonal[..., j].abs(), beta))
        has_new_direction = beta > zero_threshold * largest_entry
        off_diagonal[..., j] = torch.where(has_new_direction, beta, 0.0)
        lanczos_vector = torch.where(
            has_new_direction[..., None],
            new_vector / torch.where(has_new_direction, beta, 1.0)[..., None],
            0.0,
        )
    is_zero = lanczos_basis.square().sum(-1) < 0.5
    # The first Lanczos vector never counts as zero. So a start vector of zeros gives the eigenvalue 0 and
    # an eigenvector of zeros.
    is_zero[..., 0] = False
    diagonal = torch.where(is_zero, 4 * largest_entry[..., None] + 1, diagonal)
    side_diagonal = off_diagonal[..., : iterations - 1]
    tridiagonal_matrix = (
        torch.diag_embed(diagonal)
        + torch.diag_embed(side_diagonal, 1)
        + torch.diag_embed(side_diagonal, -1)
    )
    values, vectors = torch.linalg.eigh(tridiagonal_matrix)
    eigenvectors = (vectors[..., :, :1] * lanczos_basis).sum(-2)
    lengths = eigenvectors.norm(dim=-1, keepdim=True)
    return values[..., 0], eigenvectors / torch.where(lengths > 0.5, lengths, 1.0)


def measure_stationarity(
    problem: Problem,
    x: Tensor,
    lam: Tensor,
    sharpness: float | Tensor,
    start: Tensor,
    iterations: int = 2 * ITERATIONS,
) -> tuple[Tensor, Tensor]:
    """Measure the gradient norm and the smallest Hessian eigenvalue of the loss as a function of candidates.

    Priors are not part of this loss.

    Args:
        problem: The loss of the attack as a function of candidates and multipliers (weights of candidates).
        x: Candidates for training samples (R, m, *shape), m in each of R runs.
        lam: Multipliers (weights) of the candidates (R, m, ...), as they appear in the equation.
        sharpness: Sharpness of the smooth surrogate of the ReLU (alpha of the sigmoid, beta of the
            softplus).
        start: Start vectors of the Lanczos method, with the shape of x.
        iterations: Number of steps of the Lanczos method.

    Returns:
        The norm of the gradient (R,), and the smallest eigenvalue of the Hessian (R,), for R runs.
    """
    gradient_norm = problem.evaluate(x, lam, sharpness).grad_x.flatten(1).norm(dim=1)
    curvature = Curvature(problem, x, lam, sharpness)

    def product(v: Tensor) -> Tensor:
        return curvature.multiply_hessian(v.view_as(x)).flatten(1)

    return gradient_norm, lanczos(product, start.flatten(1), iterations)[0]
