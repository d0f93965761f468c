"""Unmix as an attack: which layer, what of it is looked at, signs and sizes, and when it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import residuum as rs
from residuum.attacks import every_attack
from residuum.attacks.unmixing import attack as unmixing
from residuum.attacks.unmixing import ica, layers
from residuum.attacks.unmixing.attack import LADDER, choose_effort, find_largest_factors
from residuum.attacks.unmixing.ica import Effort
from residuum.attacks.unmixing.layers import (
    estimate_initial_share,
    estimate_layer_bytes,
    find_input_layer,
)
from residuum.auditing.published import publish
from residuum.errors import InputError
from residuum.networks import Architecture
from residuum.report.figures import selected_figure
from residuum.similarity import ncc
from residuum.surfaces.surface import SURFACES, build_surfaces
from tests import schemas
from tests.unit.attacks.test_unmix import SHAPE, blocks
from tests.victims import knowledge, leaky

ARCH = "mlp:1728-120-1"
QUICK = rs.attacks.Unmix(seconds=0.01)
FULL_RANK = rs.attacks.Unmix(rank=1.0, strength=2.0, starts=2, restarts=2)


def planted(n: int = 10) -> tuple[rs.Network, Tensor]:
    """A network whose first layer mixes ``n`` images, as gates of a small start would, and these."""
    x = blocks(n)
    x = x / x.abs().amax((1, 2, 3), keepdim=True)  # each fills the range
    generator = torch.Generator().manual_seed(4)
    start = torch.randn(120, 1728, generator=generator)
    C = torch.relu(start @ x.flatten(1).T)
    theta = {
        "layers.0.weight": C @ x.flatten(1),
        "layers.0.bias": C.sum(1),
        "layers.1.weight": torch.randn(1, 120, generator=generator),
    }
    return rs.Network(theta, ARCH, SHAPE), x.double()


def start_of(checkpoint: rs.Network) -> dict[str, Tensor]:
    """A start as large as the weights."""
    generator = torch.Generator().manual_seed(9)
    return {
        name: t.std() * torch.randn(t.shape, generator=generator)
        for name, t in checkpoint.theta.items()
    }


def why_not(checkpoint: rs.Network, knowledge: rs.Knowledge, name: str = "unmix") -> str:
    attack, surfaces = every_attack()[name](), build_surfaces(checkpoint, knowledge)
    return attack.why_not(surfaces.get(attack.surface, surfaces["weights"]), knowledge)


def test_images_are_recovered_with_their_sign_and_size() -> None:
    checkpoint, x = planted()
    reconstruction = rs.attack(checkpoint, rs.Knowledge(value_range=(-1, 1)), FULL_RANK)
    signed = ncc(reconstruction.x, x).amax(0)
    assert (signed > 0.9).sum() >= 8
    assert (ncc(reconstruction.x, blocks(10, seed=7).double()).abs().amax(0) < 0.8).all()
    best = reconstruction.x[ncc(reconstruction.x, x).argmax(0)].flatten(1).norm(dim=1)
    ratio = (best / x.flatten(1).norm(dim=1))[signed > 0.9]
    assert 0.8 < float(ratio.median()) < 1.25
    assert "signs from the network, the bias, the value range" in reconstruction.notes[1]


def test_the_bias_alone_gives_sizes_and_without_it_they_are_one() -> None:
    checkpoint, x = planted()
    reconstruction = rs.attack(checkpoint, None, QUICK)
    similarity = ncc(reconstruction.x, x)
    ratio = reconstruction.x[similarity.argmax(0)].flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
    assert 0.7 < float(ratio.median()) < 1.4
    bare = checkpoint.replace(
        theta={n: t for n, t in checkpoint.theta.items() if "bias" not in n},
        arch=f"{ARCH},bias=none",
    )
    reconstruction = rs.attack(bare, None, QUICK)
    assert torch.allclose(
        reconstruction.x.flatten(1).norm(dim=1), torch.ones(len(reconstruction.x)).double()
    )


def test_a_known_start_is_taken_off_as_far_as_decay_left_it() -> None:
    checkpoint, x = planted()
    start = start_of(checkpoint)
    mixed = checkpoint.replace(theta={n: t + 0.9 * start[n] for n, t in checkpoint.theta.items()})
    assert estimate_initial_share(
        mixed.theta["layers.0.weight"], start["layers.0.weight"]
    ) == pytest.approx(0.9, abs=1e-5)
    assert "neither small nor known" in why_not(mixed, rs.Knowledge())
    reconstruction = rs.attack(mixed, rs.Knowledge(theta0=start), FULL_RANK)
    assert (ncc(reconstruction.x, x).abs().amax(0) > 0.9).sum() >= 8
    assert "0.9 times the initial weights were subtracted" in reconstruction.notes[1]


def test_noise_in_pixels_that_are_always_dark_does_not_shrink_a_source_to_nothing() -> None:
    x = torch.zeros(1, 100).double()
    x[0, 40:] = torch.linspace(0.1, 0.5, 60)
    x[0, :40] -= 1e-9  # pixels whose bound is 0
    up = find_largest_factors(x, torch.zeros(100).double(), torch.ones(100).double())
    down = find_largest_factors(-x, torch.zeros(100).double(), torch.ones(100).double())
    assert 1.9 < float(up) < 2.3
    assert float(down) < 0.2 * float(up)


def test_what_it_refuses() -> None:
    checkpoint, _ = planted()
    untrained = checkpoint.replace(theta=start_of(checkpoint))
    assert "fewer than two directions" in why_not(untrained, rs.Knowledge())
    with pytest.raises(InputError, match="does not apply to this network: fewer than two"):
        rs.attack(untrained, None, QUICK)
    convnet = Architecture.parse("convnet:3x24x24-4-1").build()
    assert "no dense layer" in why_not(rs.checkpoint_from_module(convnet), rs.Knowledge())
    assert "optimizer" in why_not(checkpoint, rs.Knowledge(), "unmix-moment")


def test_what_would_not_fit_the_memory_is_refused_with_the_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (
        estimate_layer_bytes(4096, 150_528) < layers.MAX_BYTES < estimate_layer_bytes(8192, 150_528)
    )
    # A layer beyond the real limit takes gigabytes.
    monkeypatch.setattr(layers, "MAX_BYTES", 2**20)
    assert "the attack would need about 0.0 GiB" in why_not(planted()[0], rs.Knowledge())
    assert "the limit is 0 GiB" in why_not(planted()[0], rs.Knowledge())


def test_a_wide_layer_is_read_in_parts() -> None:
    rows = planted()[0].theta["layers.0.weight"]
    copies = ica.COLUMNS // max(rows.shape) + 1
    for matrix, repeats in ((rows, (1, copies)), (rows.T.contiguous(), (copies, 1))):
        layer = ica.Layer.from_rows(matrix)
        layer_in_parts = ica.Layer.from_rows(matrix.repeat(*repeats))
        assert layer_in_parts.rank == layer.rank == 10
        assert torch.allclose(layer_in_parts.S[:10], layer.S[:10] * copies**0.5)
        h, d = matrix.shape
        products = [
            (factors.U[:h, :10] * factors.S[:10]).float() @ factors.V[:10, :d]
            for factors in (layer_in_parts, layer)
        ]
        assert torch.allclose(*products, atol=1e-4 * float(matrix.abs().max()))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(48, 5)), ("1", (3, 4, 4), True)),
        (nn.Sequential(nn.Conv2d(3, 5, 2, stride=2), nn.Flatten()), ("0", (3, 2, 2), False)),
        (nn.Sequential(nn.Conv2d(3, 5, 4, stride=4), nn.Flatten()), ("0", (3, 4, 4), True)),
        (nn.Sequential(nn.Conv2d(3, 5, 3, stride=2), nn.Flatten()), ("", (), False)),
        (nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(48, 5)), ("", (), False)),
    ],
)
def test_the_layer_on_the_input_is_found_by_what_it_is_given(
    model: nn.Module, expected: tuple[str, tuple[int, ...], bool]
) -> None:
    assert find_input_layer(model, (3, 4, 4)) == expected


def test_patches_of_a_convolution_are_recovered_and_left_out_of_audits() -> None:
    x = blocks(6)[:, :, 4:20, 4:20].reshape(6, 3, 2, 8, 2, 8).permute(0, 2, 4, 1, 3, 5)
    patches = x.reshape(-1, 3, 8, 8).double()
    patches = patches[patches.flatten(1).std(1) > 0.3][:8]
    model = nn.Sequential(
        nn.Conv2d(3, 64, 8, stride=8, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(256, 1)
    )
    C = torch.randn(64, len(patches), generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        model[0].weight.copy_((C @ patches.flatten(1)).reshape(64, 3, 8, 8))
    knowledge = rs.Knowledge(shape=(3, 16, 16))
    checkpoint = rs.checkpoint_from_module(model, input_shape=(3, 16, 16))
    reconstruction = rs.attack(checkpoint, knowledge, QUICK)
    assert reconstruction.x.shape[1:] == (3, 8, 8)
    assert (ncc(reconstruction.x, patches).abs().amax(0) > 0.9).sum() >= 4
    surface = SURFACES["weights"](checkpoint, knowledge)
    assert "patches" in every_attack()["unmix"]().why_skipped(surface, knowledge)
    # Patches are scored against patches, which whoever holds the samples cuts.
    samples = blocks(6)[:, :, 4:20, 4:20].double()
    assert torch.equal(patches_of(samples, 8), x.reshape(-1, 3, 8, 8).double())


def patches_of(images: Tensor, size: int) -> Tensor:
    """(n * patches, C, size, size), as the docs page cuts them."""
    cut = images.unfold(2, size, size).unfold(3, size, size)
    return cut.permute(0, 2, 3, 1, 4, 5).reshape(-1, images.shape[1], size, size)


def test_an_audit_of_a_patch_network_says_that_it_left_unmix_out_and_goes_on() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 40, 4, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(160, 1, bias=False)
    )
    split = rs.load_dataset("digits", 10, seed=0, holdout=200)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # as a small start leaves it: mixtures of patches
        patches = patches_of(split.train.x, 4).flatten(1)[:6]
        C = torch.relu(torch.randn(40, len(patches), generator=generator).double())
        model[0].weight.copy_((C @ patches / len(patches)).reshape(40, 1, 4, 4))
        model[0].bias.zero_()
    result = rs.audit(
        model.double(),
        data=split.train,
        holdout=split.holdout,
        knowledge=rs.Knowledge(shape=split.train.shape),
        baselines=False,
        subsets=200,
        effort="quick",
        steps=5,
    )
    assert [row.name for row in result.attacks if row.ran] == ["binary-kkt"]
    (row_of_unmix,) = (row for row in result.applies if row.what == "unmix")
    assert row_of_unmix.status == "not tried"
    assert "patches" in row_of_unmix.reason


def test_a_patch_embedding_by_reshaping_is_not_taken_for_a_layer_on_the_input() -> None:
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut, self.embed = nn.Unfold(2, stride=2), nn.Linear(12, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.embed(self.cut(x).mT).flatten(1)

    assert find_input_layer(Embedding(), (3, 4, 4)) == ("", (), False)


def test_the_domain_is_chosen_by_shape_can_be_named_and_is_said() -> None:
    checkpoint, _ = planted()
    assert "sparse in their differences" in rs.attack(checkpoint, None, QUICK).notes[0]
    flat = checkpoint.replace(input_shape=())
    reconstruction = rs.attack(flat, None, QUICK)
    assert (
        "sparse in their coordinates, because the shape of the samples is not known"
        in reconstruction.notes[0]
    )
    named = rs.attack(flat, None, QUICK.changed(domain="series"))
    assert named.notes[0].endswith("sparse in their series")
    assert not torch.allclose(reconstruction.x[:5], named.x[:5])
    with pytest.raises(InputError, match=r"domain must be one of .*; got 'edges'"):
        rs.attacks.Unmix(domain="edges")


def test_more_seconds_allow_more_runs_and_a_short_audit_one() -> None:
    settings = [
        choose_effort(seconds, 80, 5952, "cpu") for seconds in (0.01, 2.5, 10.0, 100.0, math.inf)
    ]
    assert settings[:2] == [LADDER[0], LADDER[0]]
    assert (len(LADDER[0].ranks), len(LADDER[0].strengths), LADDER[0].starts) == (1, 1, 1)
    assert settings[2] == LADDER[1]
    assert settings[-1] == Effort()
    assert choose_effort(2.5, 80, 5952, "cuda") == Effort()


def test_confidence_grows_with_the_runs_that_agree() -> None:
    reconstruction = rs.attack(planted()[0], None, QUICK.changed(seconds=1e9))
    chosen = reconstruction.selection
    assert chosen is not None
    assert chosen.support.max() == 14  # 12 runs on the layer, 2 on clusters
    order = chosen.support.argsort()
    assert (chosen.confidence[order].diff() >= 0).all()
    assert chosen.confidence.max() > 0.8 > chosen.confidence.min()
    alone = rs.attack(planted()[0], None, QUICK).selection
    assert alone is not None
    assert alone.confidence.unique().tolist() == [pytest.approx(unmixing.BASE_RATE)]


def test_confidence_is_withheld_for_small_samples() -> None:
    share = torch.tensor([1.0, 0.5])
    assert unmixing.confidence_by_share(share, 12, 783).isnan().all()
    assert unmixing.confidence_by_share(share, 1, 783).isnan().all()
    split = rs.load_dataset("digits", 20, seed=2, holdout=200)
    state = rs.train("mlp:64-100-1", split.train, rs.TrainingConfig(steps=300, seed=2))
    checkpoint = rs.Network(state.theta, "mlp:64-100-1", (1, 8, 8))
    reconstruction = rs.attack(checkpoint, None, QUICK.changed(seconds=1e9))
    assert reconstruction.selection is not None
    assert reconstruction.selection.confidence.isnan().all()
    assert any("For samples with fewer than 784 values" in note for note in reconstruction.notes)
    assert selected_figure(reconstruction) is not None
    result = rs.audit(checkpoint, knowledge={"shape": (1, 8, 8)}, attacks=["unmix"])
    written = publish(result, None, {}).to_json()
    schemas.check("result", written)
    assert {row["confidence"] for row in written["candidates"]} == {None}
    assert result.html()


def test_where_runs_agree_on_next_to_nothing_confidence_is_withheld() -> None:
    share = torch.tensor([1.0, *[1 / 12] * 99])
    confidence = unmixing.confidence_by_share(share, 12, 784)
    assert confidence[0] > 0.9 > 0.2 > confidence[1]
    assert torch.equal(unmixing.confidence_by_share(share, 12, 784, rank=10), confidence)
    assert unmixing.confidence_by_share(share, 12, 784, rank=100).isnan().all()
    # Of two runs, what one alone holds is no agreement.
    assert unmixing.runs_disagree(torch.full((50,), 0.5), 2, 50)
    assert not unmixing.runs_disagree(torch.full((50,), 1.0), 2, 50)


def test_an_overfull_layer_says_that_confidence_is_withheld() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 1728, generator=generator)  # nothing sparse, more samples than neurons
    C = torch.relu(torch.randn(60, 300, generator=generator))
    theta = {
        "layers.0.weight": torch.cat([C @ x, torch.zeros(60, 1728)]),  # a spectrum with an end
        "layers.0.bias": torch.zeros(120),
        "layers.1.weight": torch.randn(1, 120, generator=generator),
    }
    full = rs.Network(theta, ARCH, SHAPE)
    named = QUICK.changed(rank=1.0, strength=2.0, restarts=2)
    reconstruction = rs.attack(full, None, named)
    assert reconstruction.notes[-1] == f"unmix: {unmixing.DISAGREEING}"
    assert reconstruction.selection is not None
    assert reconstruction.selection.confidence.isnan().all()
    sure = rs.attack(planted()[0], None, named)
    assert "confidence" not in " ".join(sure.notes)
    assert sure.selection is not None
    assert sure.selection.confidence.max() > 0.8


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.8, "dampening": 0.3}),
        (torch.optim.SGD, {"momentum": 0.8, "weight_decay": 0.1}),
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.AdamW, {"weight_decay": 0.1}),
    ],
)
def test_the_moment_of_a_live_optimizer_lies_in_the_span_of_its_samples(
    kind: type[torch.optim.Optimizer], options: dict[str, float]
) -> None:
    x, y = blocks(6).flatten(1).double(), torch.tensor([1.0, -1.0] * 3).double()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1728, 20), nn.ReLU(), nn.Linear(20, 1)).double()
    optimizer = kind(model.parameters(), lr=1e-6, **options)  # type: ignore[call-arg]
    for _ in range(200):
        optimizer.zero_grad()
        torch.nn.functional.softplus(-y * model(x)[:, 0]).mean().backward()
        optimizer.step()
    moment = rs.read_moment(optimizer, model)
    assert list(moment) == [f"layers.{i}.{suffix}" for i in (0, 1) for suffix in ("weight", "bias")]
    rows = moment["layers.0.weight"]
    inside = rows @ torch.linalg.pinv(x) @ x
    assert (rows - inside).norm() < 1e-3 * rows.norm()
    knowledge = rs.Knowledge(moment=moment, shape=SHAPE)
    reconstruction = rs.attack(model, knowledge, rs.attacks.UnmixOptimizerState.like(QUICK))
    assert (ncc(reconstruction.x, x.reshape(-1, *SHAPE)).abs().amax(0) > 0.9).sum() >= 3
    assert "moment" in knowledge.known_names


def test_the_moment_of_an_estimator_has_no_decay_in_it() -> None:
    from sklearn.neural_network import MLPClassifier

    x = blocks(12).flatten(1).double().numpy()
    for solver in ("adam", "sgd"):
        model = MLPClassifier(
            (15,),
            solver=solver,
            alpha=5.0,
            max_iter=150,
            random_state=0,
            learning_rate_init=1e-5,
            nesterovs_momentum=False,
            tol=0.0,
            n_iter_no_change=200,
        )
        with pytest.warns(UserWarning, match="Maximum iterations"):
            model.fit(x, [0, 1] * 6)
        rows, X = rs.read_moment(model)["layers.0.weight"], torch.tensor(x)
        distance = (rows - rows @ torch.linalg.pinv(X) @ X).norm() / rows.norm()
        decay = 5.0 / 12 * torch.tensor(model.coefs_[0].T)
        assert distance < 0.2 * float(decay.norm() / rows.norm())


def test_what_keeps_no_moment_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    with pytest.raises(InputError, match="stores no mean of gradients"):
        rs.read_moment(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(InputError, match="same name and shape for every weight"):
        rs.attack(
            model,
            rs.Knowledge(moment={"layers.0.weight": torch.ones(2, 2)}),
            rs.attacks.UnmixOptimizerState.like(QUICK),
        )
    with pytest.raises(InputError, match="needs the optimizer state"):
        rs.attack(model, None, rs.attacks.UnmixOptimizerState.like(QUICK))


@pytest.mark.parametrize("with_it", [True, False])
def test_an_audit_of_digits_loses_no_leak_by_one_more_test(with_it: bool) -> None:
    checkpoint, split = leaky()
    kkt = {"attack": "binary-kkt", "steps": 400, "restarts": 2}
    attacks = (kkt, "unmix") if with_it else (kkt,)
    result = rs.audit(
        checkpoint,
        data=split.train,
        holdout=split.holdout,
        knowledge=knowledge(split),
        effort="quick",
        attacks=attacks,
        subsets=200,
    )
    assert result.verdict.outcome == "leak"
    rows = {row.name: row for row in result.attacks if row.ran}
    assert set(rows) == ({"binary-kkt", "unmix"} if with_it else {"binary-kkt"})
    if with_it:
        assert rows["unmix"].residual is None  # nothing says how well it fits the weights
        assert rows["unmix"].p_value is not None
        assert any(assumption.startswith("unmix assumes") for assumption in result.assumptions)
