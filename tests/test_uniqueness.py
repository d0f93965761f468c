"""The uniqueness certificate against naive twins, at exact points and on random networks."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.optimize import linprog, minimize
from torch import Tensor, nn

from residuum.cli.main import main
from residuum.errors import InputError
from residuum.networks import MLP, ConvNet, Linear
from residuum.records import Knowledge, Reconstruction, Selection
from residuum.records.certificate import Uniqueness
from residuum.report.figures import ambiguity_figure
from residuum.stationarity import by_layer, parameters
from residuum.theory.patterns import slope_matrix
from residuum.theory.polynomial import identifiability
from residuum.theory.uniqueness import estimate, question, uniqueness
from residuum.theory.uniqueness.cell import build_cell, gates
from residuum.theory.uniqueness.nullspace import block_null, dense_null, layer_bounds, row_space
from residuum.theory.uniqueness.system import build_system
from tests.cases import coherent_point, multiclass_point, relu_point


def naive_residual(model: nn.Module, x: Tensor, u: Tensor) -> Tensor:
    """-sum_i grad <u_i, Phi(x_i)>, one sample at a time, each layer over its norm: (P,)."""
    theta = list(model.named_parameters())
    scale = {
        n: torch.cat([dict(theta)[k].flatten() for k in names]).norm()
        for names in by_layer(dict(theta)).values()
        for n in names
    }
    total = 0
    for sample, covector in zip(x, u, strict=True):
        value = (model(sample[None])[0] * covector).sum()
        parts = torch.autograd.grad(value, [p for _, p in theta], create_graph=True)
        total = total - torch.cat(
            [g.flatten() / scale[n].detach() for g, (n, _) in zip(parts, theta, strict=True)]
        )
    return total


def naive_null(model: nn.Module, x: Tensor, y: Tensor, lam: Tensor) -> tuple[int, Tensor]:
    """Dimension of the null space of the residual's Jacobian in (x, lam), and the Jacobian."""
    parts = torch.autograd.functional.jacobian(
        lambda a, b: naive_residual(model, a, (b * y)[:, None]), (x, lam)
    )
    matrix = torch.cat([part.flatten(1) for part in parts], 1)
    values = torch.linalg.svdvals(matrix)
    return matrix.shape[1] - int((values > 1e-10 * values[0]).sum()), matrix


def pair_change(model: nn.Module, x: Tensor, u: Tensor, i: int, a: Tensor) -> float:
    """Change of the residual of all candidates when i is split into x + a and x - a."""
    points = torch.cat([x, (x[i] + a)[None], (x[i] - a)[None]])
    weights = torch.cat([u, u[[i, i]] / 2])
    weights[i] = 0
    change = naive_residual(model, points, weights) - naive_residual(model, x, u)
    return float(change.detach().norm())


def random_mlp(
    widths: tuple[int, ...], m: int, seed: int = 0
) -> tuple[MLP, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = MLP(widths).double()
    x = torch.randn(m, widths[0], dtype=torch.float64)
    y = torch.where(torch.arange(m) % 2 == 0, 1.0, -1.0).double()
    return model, x, y, torch.rand(m).double() + 0.5


@pytest.mark.parametrize(
    ("case", "single", "double"),
    [
        ({"groups": 4, "size": 1}, 0, 52),  # one sample per pattern, rank X = 4 < d = 12
        ({"groups": 2, "size": 3}, 52, 130),  # (m - patterns)(d + 1) is left undoubled
        ({"depth": 3, "groups": 3, "size": 2}, 39, 117),
    ],
)
def test_null_space_of_exact_points(case, single, double):
    point = relu_point(dim=12, **case)
    found = uniqueness(point.model, point.x, point.y, point.lam, samples=1).null_space
    twice = (torch.cat([t, t]) for t in (point.x, point.y, point.lam / 2))
    assert naive_null(point.model, point.x, point.y, point.lam)[0] == single
    assert naive_null(point.model, *twice)[0] == double
    assert (found.undoubled, found.undoubled_most, found.doubled) == (single, single, double)
    assert found.twins + found.pairs_inside + found.pairs_outside + single == double


def test_doubled_null_space_holds_the_directions_of_theorem_4():
    point = relu_point(groups=4, size=1, dim=12)
    assert torch.linalg.matrix_rank(point.x) == 4
    found = uniqueness(point.model, point.x, point.y, point.lam)
    w = point.model.linears[0].weight.detach()
    n, d = point.x.shape
    matrix = naive_null(
        point.model, *(torch.cat([t, t]) for t in (point.x, point.y, point.lam / 2))
    )[1]
    for i in range(n):
        nu = found.direction[i]
        assert float((w @ nu).norm()) < 1e-12
        v = torch.zeros(2 * n, d, dtype=torch.float64)
        v[i], v[n + i] = nu, -nu
        flat = torch.cat([v.flatten(), torch.zeros(2 * n)])
        assert float((matrix @ flat).norm()) < 1e-14
        one = torch.cat([(v * (torch.arange(2 * n) == i)[:, None]).flatten(), torch.zeros(2 * n)])
        assert float((matrix @ one).norm()) > 1e-3  # a single moved sample is never ambiguous
        u = (point.lam * point.y)[:, None]
        assert pair_change(point.model, point.x, u, i, 1e6 * nu) < 1e-9
    assert found.radius.isinf().all()
    assert (found.outside > 1 - 1e-12).all()
    assert found.radius_inside.isfinite().all()


def test_cubic_point_has_its_scale_symmetry_and_nothing_more():
    point = coherent_point(4, 6, 0.2)
    conditions = identifiability(point.model)
    assert conditions.rank == conditions.coefficients
    found = uniqueness(point.model, point.x, point.y, point.lam, samples=1)
    assert found.null_space.undoubled == len(point.x)
    dimension, matrix = naive_null(point.model, point.x, point.y, point.lam)
    assert dimension == len(point.x)
    for i in range(len(point.x)):  # (x, lam) ~ (t x, lam / t^3)
        dx, dlam = torch.zeros_like(point.x), torch.zeros_like(point.lam)
        dx[i], dlam[i] = point.x[i], -3 * point.lam[i]
        assert float((matrix @ torch.cat([dx.flatten(), dlam])).norm()) < 1e-10
    fewer = naive_null(point.model, point.x[:3], point.y[:3], point.lam[:3])[0]
    assert fewer == 3


def test_cubic_radius_is_where_the_curvature_reaches_the_tolerance():
    point = coherent_point(3, 5, 0.2)
    u = (point.lam * point.y)[:, None]
    found = uniqueness(point.model, point.x, point.y, point.lam, tolerance=1e-4)
    assert found.blocked_by == ("tolerance",) * 3
    for i in range(3):
        a = found.radius[i] * found.direction[i]
        assert pair_change(point.model, point.x, u, i, 0.9 * a) < 1e-4
        assert pair_change(point.model, point.x, u, i, 1.5 * a) > 1e-4


def test_linear_network_determines_only_the_sums():
    torch.manual_seed(0)
    model = MLP((5, 4, 1), activation=Linear()).double()
    m, d = 6, 5
    x, y, lam = torch.randn(m, d).double(), torch.ones(m).double(), torch.rand(m).double() + 0.5
    y[::2] = -1
    found = uniqueness(model, x, y, lam)
    assert found.null_space.patterns == 1
    assert found.null_space.undoubled == (m - 1) * (d + 1) == naive_null(model, x, y, lam)[0]
    assert any("only the sums" in note for note in found.notes)
    assert found.radius.isinf().all()
    assert float(found.determined_energy.max()) < 1e-12
    assert found.pixels.isinf().all()
    assert pair_change(model, x, (lam * y)[:, None], 0, 1e3 * found.direction[0]) < 1e-9


NETWORKS = {
    "two layers": lambda: random_mlp((6, 20, 1), 5),
    "three layers": lambda: random_mlp((6, 14, 11, 1), 5, 1),
    "four layers": lambda: random_mlp((5, 9, 9, 9, 1), 4, 2),
}


@pytest.mark.parametrize("tolerance", [1e-9, 1e-2, 0.1])
@pytest.mark.parametrize("name", NETWORKS)
def test_radius_is_the_exact_stopping_point(name, tolerance):
    model, x, y, lam = NETWORKS[name]()
    u = (lam * y)[:, None]
    found = uniqueness(model, x, y, lam, tolerance=tolerance)
    assert found.radius.isfinite().all()
    for i in range(len(x)):
        a = found.radius[i] * found.direction[i]
        for share in (0.3, 0.6, 0.9, 0.999):
            assert pair_change(model, x, u, i, share * a) < tolerance
        assert pair_change(model, x, u, i, 1.001 * a) > tolerance
        assert pair_change(model, x, u, i, 1.5 * a) > tolerance
    if tolerance == 1e-9:
        assert (found.radius <= found.radius_most * (1 + 1e-9)).all()
        assert all(reason.startswith("layers.") for reason in found.blocked_by)


def test_a_larger_tolerance_passes_more_switches():
    model, x, y, lam = NETWORKS["two layers"]()
    close, wide = (uniqueness(model, x, y, lam, tolerance=t).radius for t in (1e-9, 0.1))
    assert (wide > close * (1 + 1e-6)).all()


def test_convnet_radius():
    torch.manual_seed(3)
    model = ConvNet((1, 4, 4), (8,), 1).double()
    x, y = torch.randn(3, 1, 4, 4).double(), torch.tensor([1.0, -1.0, 1.0]).double()
    lam = torch.ones(3).double()
    found = uniqueness(model, x, y, lam)
    u = (lam * y)[:, None]
    for i in range(3):
        a = found.radius[i] * found.direction[i]
        assert pair_change(model, x, u, i, 0.9 * a) < 1e-6 < pair_change(model, x, u, i, 1.5 * a)


def test_box_stops_a_pair_and_pins_pixels_at_its_ends():
    model, x, y, lam = NETWORKS["three layers"]()
    x = x.clamp(-1, 1)
    found = uniqueness(model, x, y, lam, box=(-1.0, 1.0))
    for share in (1, -1):
        reached = x + share * found.radius[:, None] * found.direction
        assert float(reached.abs().max()) <= 1 + 1e-9
    assert float(found.pixels[x.abs() == 1].abs().max()) == 0
    assert (x.abs() == 1).any()
    assert (found.determined_energy > uniqueness(model, x, y, lam).determined_energy - 1e-3).all()


def test_gates_and_change_agree_with_their_twins():
    model, x, y, lam = NETWORKS["four layers"]()
    value, slope = gates(model, x[0])
    torch.testing.assert_close(slope, slope_matrix([model], x[0]))
    torch.testing.assert_close(value, torch.cat([z[0] for z in model.trace(x[:1]).pre[:-1]]))
    system = build_system(model, x, y, lam, "binary", model(x).detach())
    for size in (0.01, 1.0, 5.0):
        a = size * torch.ones(5).double()
        assert system.change(1, a) == pytest.approx(
            pair_change(model, x, (lam * y)[:, None], 1, a), rel=1e-9, abs=1e-14
        )
    forward, backward = system.products()
    v = torch.randn(
        system.unknowns, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    w = forward(v)
    assert float(w @ w) == pytest.approx(float(v @ backward(w)), rel=1e-10)


@pytest.mark.parametrize("name", NETWORKS)
def test_least_image_against_a_general_solver(name):
    model, x, y, lam = NETWORKS[name]()
    found = uniqueness(model, x, y, lam)
    for i in range(2):
        value, slope = (t.numpy() for t in gates(model, x[i]))
        flat, width = x[i].numpy(), np.abs(value)
        best = minimize(
            lambda a, flat=flat: (flat + a) @ (flat + a), np.zeros_like(flat), method="SLSQP",
            jac=lambda a, flat=flat: 2 * (flat + a), options={"ftol": 1e-14, "maxiter": 500},
            constraints=[
                {"type": "ineq", "fun": lambda a, s=s, w=width, b=slope: w - s * (b @ a)}
                for s in (1, -1)
            ],
        )  # fmt: skip
        truth = best.fun / (flat @ flat)
        assert float(found.determined_energy[i]) == pytest.approx(truth, abs=2e-3)
        assert float(found.determined_at_least[i]) <= truth + 1e-9
        a = found.least[i] - x[i]
        assert pair_change(model, x, (lam * y)[:, None], i, a) < 1e-12
        beyond = pair_change(model, x, (lam * y)[:, None], i, 1.01 * a)
        assert beyond > 1e-6  # the least image touches a wall


def test_pixels_are_attained_and_within_the_exact_maximum():
    model, x, y, lam = NETWORKS["three layers"]()
    found = uniqueness(model, x, y, lam, box=(-3.0, 3.0))
    value, slope = (t.numpy() for t in gates(model, x[0]))
    rows, width = np.concatenate([slope, -slope]), np.abs(np.concatenate([value, value]))
    reach = (3 - x[0].abs()).clamp(min=0)
    limits = [(-r, r) for r in reach.tolist()]
    exact = np.array([-linprog(-e, rows, width, bounds=limits).fun for e in np.eye(6)])
    pixels = found.pixels[0].numpy()
    assert (pixels <= exact + 1e-9).all()
    assert (pixels >= 0.5 * exact).all()
    span = row_space(build_system(model, x, y, lam, "binary", model(x).detach()))
    cell = build_cell(model, x[0], span, (torch.tensor(-3.0), torch.tensor(3.0)))
    assert cell.most >= float(found.radius[0])


def test_samples_on_a_kink_are_told():
    model, x, y, lam = NETWORKS["two layers"]()
    with torch.no_grad():
        model.linears[0].weight[:3] = torch.eye(3, 6)
        model.linears[0].bias[:3] = 0
    x[0, :3] = 0
    found = uniqueness(model, x, y, lam)
    assert found.kinks.tolist() == [3, 0, 0, 0, 0]
    assert float(found.direction[0, :3].abs().max()) < 1e-12
    assert float(found.radius[0]) > 0


def test_block_method_counts_what_the_dense_one_does():
    for case in ({"groups": 2, "size": 2, "dim": 6}, {"groups": 3, "size": 1, "dim": 7}):
        point = relu_point(**case)
        system = build_system(
            point.model, point.x, point.y, point.lam, "binary", point.model(point.x)
        )
        found, change, complete = block_null(system)
        assert complete
        assert found == dense_null(system)[0]
        assert change <= 1e-7
    assert found == 0


def test_layer_bounds_enclose_the_dense_count():
    for case in (
        {"groups": 2, "size": 3},
        {"depth": 3, "groups": 3, "size": 2},
        {"groups": 4, "size": 1},
    ):
        point = relu_point(dim=9, **case)
        system = build_system(
            point.model, point.x, point.y, point.lam, "binary", point.model(point.x)
        )
        least, most = layer_bounds(system, len(row_space(system)))
        assert least <= dense_null(system)[0] <= most
    assert most == 0  # independent patterns: exact


def test_several_classes_and_free_multipliers():
    point = multiclass_point(3, 2, dim=9)
    outputs = point.model(point.x).detach()
    lam = torch.zeros(len(point.x), 3, dtype=torch.float64)
    for i, label in enumerate(point.y.tolist()):
        rivals = [c for c in range(3) if c != label]
        lam[i, rivals] = point.lam[2 * i : 2 * i + 2]
    system = build_system(point.model, point.x, point.y, lam, "multiclass", outputs)
    residual = naive_residual(point.model, point.x, system.u)
    theta = parameters(point.model)
    scaled = torch.cat([system.scales[n] * theta[n].flatten() for n in theta])
    assert float((scaled + residual).norm()) < 1e-12  # an exact KKT point: the rows are right
    found = uniqueness(point.model, point.x, point.y, lam)
    assert found.task == "multiclass"
    assert found.null_space.twins == len(point.lam)
    free = uniqueness(point.model, point.x, outputs, outputs, task="regression", samples=2)
    assert len(free) == 2


def test_limits_idle_candidates_and_refusals():
    model, x, y, lam = NETWORKS["two layers"]()
    lam[1] = 0
    found = uniqueness(model, x, y, lam, samples=2)
    assert found.index.tolist() == [0, 2]
    assert found.null_space.twins == 4
    assert any("without a multiplier" in note for note in found.notes)
    late = uniqueness(model, x, y, lam, seconds=0)
    assert len(late) == 1
    assert any(note.startswith("time: 1 of 4") for note in late.notes)
    with pytest.raises(InputError, match="multipliers"):
        uniqueness(model, x, y, 0 * lam)
    with pytest.raises(InputError, match="tolerance"):
        uniqueness(model, x, y, lam, tolerance=0)


def test_same_answer_twice_and_round_trip(tmp_path):
    model, x, y, lam = NETWORKS["three layers"]()
    first, second = (uniqueness(model, x, y, lam, samples=2) for _ in range(2))
    assert torch.equal(first.radius, second.radius)
    assert torch.equal(first.pixels, second.pixels)
    first.save(tmp_path / "u.safetensors")
    again = Uniqueness.load(tmp_path / "u.safetensors")
    assert again.to_json() == first.to_json()
    json.dumps(first.to_json(), allow_nan=False)


def test_estimate_grows_with_the_work():
    small, large = random_mlp((20, 50, 1), 4), random_mlp((200, 400, 400, 1), 4)
    a, b = (estimate(model, x) for model, x, *_ in (small, large))
    assert b.operations > 10 * a.operations
    assert b.seconds > a.seconds
    assert estimate(large[0], large[1], samples=1).operations < b.operations
    assert "GFlop" in str(b)


def reconstruction(
    model: MLP, x: Tensor, y: Tensor, lam: Tensor, **settings: str
) -> Reconstruction:
    """Two restarts that hold the same candidates, the second with the smaller loss."""
    both, n = torch.cat([x, x + 0.01]), len(x)
    chosen = Selection(
        x, y, lam, torch.full((n,), 2), torch.full((n,), 2), torch.linspace(1, 0.5, n),
        torch.zeros(n, 3), torch.arange(n),
    )  # fmt: skip
    return Reconstruction(
        "binary-kkt", both, torch.cat([y, y]), torch.cat([lam, lam]),
        torch.arange(2).repeat_interleave(n), torch.tensor([1]), torch.tensor([[2.0], [1.0]]),
        torch.zeros(2, 1, 2), ("layers.0", "layers.1"), ("finished", "finished"),
        Knowledge(value_range=(-4.0, 4.0)), {"objective": "binary-kkt", **settings}, chosen,
    )  # fmt: skip


def test_question_takes_the_selection_or_the_best_restart():
    model, x, y, lam = NETWORKS["two layers"]()
    found = reconstruction(model, x, y, lam)
    selected, best = question(model, found), question(model, found, "best")
    assert torch.equal(selected.candidates.x, x)
    assert torch.equal(best.candidates.x, x + 0.01)
    assert selected.box is not None
    assert selected.answer(samples=1).box
    with pytest.raises(InputError, match="No candidates"):
        question(model, found, "all")
    with pytest.raises(InputError, match="both"):
        question(model, reconstruction(model, x, y, lam, objective="ntk", gradients="both"))


def test_figure_of_images_and_of_vectors():
    model, x, y, lam = random_mlp((16, 12, 1), 3)
    found = uniqueness(model, x.reshape(3, 1, 4, 4), y, lam)
    png = b"\x89PNG"
    assert ambiguity_figure(x.reshape(3, 1, 4, 4), found, agreement=["2/2"] * 3)[:4] == png
    assert ambiguity_figure(x, uniqueness(model, x, y, lam))[:4] == png


def test_certify_a_run(tmp_path, capsys):
    def run(*arguments):
        code = main([str(a) for a in arguments])
        return code, *capsys.readouterr()

    model, x, y, lam = NETWORKS["two layers"]()
    save_file(dict(model.state_dict()), tmp_path / "m.safetensors")
    (tmp_path / "run").mkdir()
    reconstruction(model, x, y, lam).save(tmp_path / "run" / "reconstruction.safetensors")
    arguments = ["certify", tmp_path / "m.safetensors", "--reconstruction", tmp_path / "run"]
    out = tmp_path / "out"
    code, text, _ = run(*arguments, "--out", out, "--json")
    assert code == 0
    summary = json.loads(text)
    assert summary["certified"] == 5
    assert summary["per_sample"][0]["support"] == 2
    assert summary["null_space"]["doubled"] == 35 + summary["null_space"]["undoubled"]
    assert json.loads((out / "uniqueness.json").read_text()) == summary
    assert Uniqueness.load(out / "uniqueness.safetensors").samples == 5
    assert (out / "ambiguity.png").is_file()
    code, text, _ = run(*arguments, "--samples", 2, "--candidates", "best")
    assert code == 0
    assert text.startswith("cost: 2 candidates")
    assert "inside row(W1)" in text
    assert "pairs keep" in text
    assert "at least" in text
    assert "not covered" in text
    code, _, error = run(*arguments, "--data", "train.npz")
    assert code == 2
    assert "two different certificates" in error
    assert math.isfinite(summary["per_sample"][0]["radius"])
