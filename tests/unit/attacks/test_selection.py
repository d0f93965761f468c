"""Selection on planted clusters, and the baselines that every reconstruction must beat."""

from __future__ import annotations

import math

import pytest
import torch

from residuum.attacks import FirstLayerWeights, ModelInversion, attack, select
from residuum.attacks.selection import (
    FEATURES,
    SIMILARITY,
    WEIGHT_FLOOR,
    effective_dimension,
    find_usable_candidates,
    group_candidates,
    load_calibration,
)
from residuum.errors import InputError
from residuum.networks import Architecture
from residuum.networks.network import Network
from residuum.records import Knowledge, Reconstruction, same
from residuum.similarity import cosine

DIM, RESTARTS = 30, 4
# Center of each planted cluster, label, and (restart, multiplier) of its members.
PLANTED = [
    (0, 1, [(0, 0.5), (1, 0.7), (2, 0.6), (3, 0.4)]),
    (1, 1, [(0, 0.3), (2, 0.2)]),
    (2, -1, [(1, 0.9), (1, 0.8), (3, 0.2)]),  # one restart twice: support 2
    (2, 1, [(0, 0.25), (3, 0.35)]),  # the same image under the other label
    (3, -1, [(2, 2.0)]),  # heavy, but alone
    (4, -1, [(0, 0.1)]),
]


def reconstruction(x, labels, lam, run, restarts=RESTARTS):
    return Reconstruction(
        attack="binary-kkt",
        x=x,
        labels=labels,
        lam=lam,
        run=run,
        steps=torch.zeros(0),
        loss=torch.zeros(restarts, 0),
        layers=torch.zeros(restarts, 0, 0),
        layer_names=(),
        status=("finished",) * restarts,
        knowledge=Knowledge(),
    )


def planted(noise=0.01, shape=(DIM,)):
    """Candidates around orthogonal centers of different length, and the cluster of each."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        (center, label, run, lam, cluster)
        for cluster, (center, label, members) in enumerate(PLANTED)
        for run, lam in members
    ]
    center, label, run, lam, cluster = (list(column) for column in zip(*rows, strict=True))
    x = (1 + torch.tensor(center))[:, None] * torch.eye(DIM, dtype=torch.float64)[center]
    x = x + noise * torch.randn(len(rows), DIM, generator=generator, dtype=torch.float64)
    candidates = reconstruction(
        x.view(-1, *shape),
        torch.tensor(label, dtype=torch.float64),
        torch.tensor(lam, dtype=torch.float64),
        torch.tensor(run),
    )
    return candidates, torch.tensor(cluster)


def clusters_of(chosen, cluster):
    """The planted cluster of every selected row, by its representative."""
    return cluster[chosen.index].tolist()


def permuted(candidates, order):
    fields = {name: getattr(candidates, name)[order] for name in ("x", "labels", "lam", "run")}
    return candidates.replace(**fields)


@pytest.mark.parametrize("shape", [(DIM,), (1, 5, 6)])
@pytest.mark.parametrize("radius", [None, 0.5])
def test_planted_clusters_are_recovered(radius, shape):
    candidates, cluster = planted(shape=shape)
    chosen = select(candidates, radius=radius)
    order = clusters_of(chosen, cluster)
    assert sorted(order) == list(range(len(PLANTED)))
    for k, c in enumerate(order):
        _, label, members = PLANTED[c]
        weights = torch.tensor([lam for _, lam in members], dtype=torch.float64)
        restarts = len({run for run, _ in members})
        mask = candidates.x[cluster == c]
        mean = sum(w * x for w, x in zip(weights, mask, strict=True)) / weights.sum()
        assert torch.allclose(chosen.x[k], mean, atol=1e-12)
        assert chosen.labels[k] == label
        assert chosen.support[k] == restarts
        assert chosen.members[k] == len(members)
        assert float(chosen.lam[k]) == pytest.approx(float(weights.sum()) / restarts)
        heaviest = candidates.lam[chosen.index[k]]
        assert heaviest == weights.max()
    assert chosen.x.shape == (len(PLANTED), *shape)


def test_consensus_comes_first_and_singletons_after_whatever_their_weight():
    candidates, cluster = planted()
    chosen = select(candidates)
    assert [int(s) > 1 for s in chosen.support] == [True] * 4 + [False] * 2
    for confidences in (chosen.confidence[:4], chosen.confidence[4:]):
        assert confidences.tolist() == sorted(confidences.tolist(), reverse=True)
    assert clusters_of(chosen, cluster)[4] == 4  # of two alone the heavier first
    assert ((chosen.confidence >= 0) & (chosen.confidence <= 1)).all()


def test_confidence_is_the_calibrated_logistic_of_the_features():
    candidates, _ = planted()
    chosen, constants = select(candidates), load_calibration()
    assert chosen.features.shape == (len(PLANTED), len(FEATURES))
    heaviest = float(chosen.lam.max())
    for k in range(len(chosen)):
        share, weight, tightness, agreement, spread = chosen.features[k].tolist()
        assert share == pytest.approx(int(chosen.support[k]) / RESTARTS)
        assert weight == pytest.approx(math.log(float(chosen.lam[k]) / heaviest), abs=1e-6)
        assert 0.99 < tightness <= 1 + 1e-6
        assert agreement == float(chosen.support[k] > 1)
        directions = float(torch.linalg.svdvals(_unit(candidates.x)).square().pow(2).sum())
        assert spread == pytest.approx(
            agreement * math.log(len(candidates.x) ** 2 / directions), rel=1e-5
        )
        pairs = zip(constants["weights"], chosen.features[k].tolist(), strict=True)
        score = constants["intercept"] + sum(w * f for w, f in pairs)
        assert float(chosen.confidence[k]) == pytest.approx(1 / (1 + math.exp(-score)), rel=1e-4)


def _unit(x):
    return x.flatten(1) / x.flatten(1).norm(dim=1, keepdim=True)


def test_effective_dimension_counts_directions():
    """d orthogonal directions, each as often as the others, count d; copies and lengths do not."""
    basis = torch.eye(7, dtype=torch.float64)
    assert effective_dimension(basis) == pytest.approx(7)
    assert effective_dimension(torch.cat([3 * basis, -basis])) == pytest.approx(7)
    assert effective_dimension(basis[:1].repeat(5, 1)) == pytest.approx(1)
    assert effective_dimension(basis[:0]) == 1
    many = basis.repeat(400, 1)[torch.randperm(2800, generator=torch.Generator().manual_seed(0))]
    assert effective_dimension(many) == pytest.approx(7, rel=0.02)  # looks at a part of them


def test_one_restart_cannot_agree_with_anybody():
    candidates, _ = planted()
    alone = candidates.replace(run=torch.zeros_like(candidates.run), status=("finished",))
    chosen = select(alone)
    assert (chosen.support == 1).all()
    assert chosen.confidence.tolist() == pytest.approx(
        [load_calibration()["base_rate"]] * len(chosen)
    )
    assert chosen.lam.tolist() == sorted(chosen.lam.tolist(), reverse=True)


def test_labels_are_never_mixed():
    candidates, _ = planted()
    one_label = candidates.replace(labels=torch.ones_like(candidates.labels))
    chosen = select(one_label)
    assert len(chosen) == len(PLANTED) - 1  # clusters 2 and 3 hold one image
    assert (chosen.members == 5).sum() == 1
    assert len(select(candidates)) == len(PLANTED)


def test_the_order_of_candidates_does_not_matter():
    candidates, cluster = planted()
    first = select(candidates)
    order = torch.randperm(len(candidates.x), generator=torch.Generator().manual_seed(3))
    permuted_selection = select(permuted(candidates, order))
    assert clusters_of(permuted_selection, cluster[order]) == clusters_of(first, cluster)
    assert torch.equal(order[permuted_selection.index], first.index)
    assert torch.allclose(permuted_selection.x, first.x, atol=1e-14)
    assert torch.equal(permuted_selection.support, first.support)
    assert torch.equal(permuted_selection.members, first.members)


def test_selection_is_deterministic():
    assert same(select(planted()[0]), select(planted()[0]))


def test_similarity_decides_what_a_group_is():
    candidates, _ = planted(noise=0.3)
    tight, loose = select(candidates, similarity=0.999), select(candidates, similarity=-1.0)
    assert len(tight) == len(candidates.x)
    assert (tight.support == 1).all()
    assert len(loose) == 2  # one per label
    pair = torch.eye(DIM, dtype=torch.float64)
    for angle, groups in ((0.99, 1), (1.01, 2)):
        angle = angle * math.acos(SIMILARITY)
        x = torch.stack([pair[0], math.cos(angle) * pair[0] + math.sin(angle) * pair[1]])
        two = reconstruction(x, torch.ones(2), torch.ones(2), torch.tensor([0, 1]), 2)
        assert len(select(two)) == groups


def test_a_radius_sees_lengths_where_the_cosine_does_not():
    x = torch.tensor([[1.0], [2.0]], dtype=torch.float64) * torch.eye(DIM, dtype=torch.float64)[0]
    two = reconstruction(x, torch.ones(2), torch.ones(2), torch.tensor([0, 1]), 2)
    assert len(select(two)) == 1
    assert len(select(two, radius=0.5)) == 2
    assert len(select(two, radius=1.0)) == 1


def test_light_candidates_of_a_restart_are_dropped():
    candidates, _ = planted()
    lam = candidates.lam.clone()
    lam[4] = 0.9 * WEIGHT_FLOOR * lam[candidates.run == 0].max()
    lam[1] = 1.1 * WEIGHT_FLOOR * lam[candidates.run == 1].max()
    assert find_usable_candidates(candidates).all()
    usable = find_usable_candidates(candidates.replace(lam=lam))
    assert (~usable).nonzero().flatten().tolist() == [4]
    # Only its own restart is a yardstick: another one may be heavier by any factor.
    scaled = torch.where(candidates.run == 1, 1e6 * candidates.lam, candidates.lam)
    assert find_usable_candidates(candidates.replace(lam=scaled)).all()


def test_multipliers_of_any_shape_weigh_by_their_absolute_sum():
    candidates, _ = planted()
    free = torch.stack([-0.25 * candidates.lam, 0.75 * candidates.lam], 1)
    chosen = select(candidates.replace(lam=free))
    assert same(chosen.index, select(candidates).index)
    assert torch.allclose(chosen.lam, select(candidates).lam)


def test_candidates_that_are_no_numbers_are_ignored():
    candidates, _ = planted()
    expected = select(candidates)
    nonsense = torch.zeros(4, DIM, dtype=torch.float64)
    nonsense[0, 3], nonsense[1, 0], nonsense[3, 0] = math.nan, math.inf, 1.0
    more = candidates.replace(
        x=torch.cat([nonsense, candidates.x]),
        labels=torch.cat([torch.ones(4), candidates.labels]),
        lam=torch.cat([torch.tensor([5.0, 5.0, 5.0, math.nan]), candidates.lam]),
        run=torch.cat([torch.zeros(4).long(), candidates.run]),
    )
    chosen = select(more)
    assert torch.equal(chosen.index - 4, expected.index)
    assert torch.equal(chosen.x, expected.x)


def test_nothing_comes_of_nothing():
    candidates, _ = planted()
    for nothing in (
        candidates.replace(x=torch.full_like(candidates.x, math.nan)),
        candidates.replace(lam=torch.zeros_like(candidates.lam)),
        candidates.replace(x=torch.zeros_like(candidates.x)),
    ):
        chosen = select(nothing)
        assert len(chosen) == 0
        assert chosen.x.shape == (0, DIM)
        assert chosen.features.shape == (0, len(FEATURES))


def test_groups_begin_with_the_heaviest_and_hold_what_is_near_it():
    x = torch.tensor([[0.0], [0.3], [0.6], [5.0], [5.2]], dtype=torch.float64)
    weight = torch.tensor([1.0, 3.0, 2.0, 0.5, 0.7])
    groups = [group.tolist() for group in group_candidates(x, weight, 0.0, 0.31)]
    assert groups == [[0, 1, 2], [3, 4]]
    assert [group.tolist() for group in group_candidates(x, weight, 0.0, 0.25)] == [
        [1],
        [2],
        [0],
        [3, 4],
    ]
    assert [group.tolist() for group in group_candidates(x, weight, 0.0, 0.0)] == [
        [1],
        [2],
        [0],
        [4],
        [3],
    ]
    assert group_candidates(x[:0], weight[:0], 0.0, 1.0) == []


# Baselines


def released(arch, seed=0):
    torch.manual_seed(seed)
    return Network(dict(Architecture.parse(arch).build().state_dict()), arch)


INVERSION = ModelInversion(steps=40, lr_x=0.02, candidates=6, sigma=0.1)


@pytest.mark.parametrize("arch", ["mlp:9-20-1", "mlp:9-20-3", "convnet:1x3x3-6-1"])
def test_model_inversion_raises_its_outputs(arch):
    checkpoint = released(arch)
    first = attack(checkpoint, None, INVERSION.changed(steps=1))
    last = attack(checkpoint, None, INVERSION)
    model = checkpoint.copy_module().double()

    def raised(reconstruction):
        out, labels = model(reconstruction.x).detach(), reconstruction.labels
        return labels * out[:, 0] if out.shape[1] == 1 else out[range(6), labels.long()]

    assert (raised(last) > raised(first) + 0.05).all()
    assert torch.allclose(last.lam, raised(last).clamp(min=0), atol=1e-12)
    expected = [0, 1, 2, 0, 1, 2] if arch.endswith("3") else [-1] * 3 + [1] * 3
    assert last.labels.tolist() == expected
    assert (last.x.flatten(1).norm(dim=1) <= 3 + 1e-9).all()  # no further than sqrt(d)
    assert (last.attack, last.status) == ("model-inversion", ("finished",))


def test_model_inversion_stays_in_the_known_box():
    mean = torch.linspace(0.2, 0.6, 9, dtype=torch.float64)
    knowledge = Knowledge(value_range=(0.0, 1.0), mean=mean)
    fast_inversion = INVERSION.changed(lr_x=0.3)
    images = attack(released("mlp:9-20-1"), knowledge, fast_inversion).x + mean
    assert images.min() >= -1e-12
    assert images.max() <= 1 + 1e-12
    assert images.max() > 0.999  # it went as far as it may
    free = attack(released("mlp:9-20-1"), None, fast_inversion).x + mean
    assert free.max() > 1.1


def test_first_layer_weights_are_the_rows_heaviest_first():
    checkpoint = released("mlp:9-20-7-1")
    config = FirstLayerWeights()
    rows_found = attack(checkpoint, Knowledge(shape=(1, 3, 3)), config)
    rows = checkpoint.theta["layers.0.weight"].double()
    sizes = rows.norm(dim=1)
    assert rows_found.x.shape == (20, 1, 3, 3)
    assert rows_found.lam.tolist() == sorted(sizes.tolist(), reverse=True)
    for x, size in zip(rows_found.x, rows_found.lam, strict=True):
        assert torch.equal(x.flatten(), rows[sizes == size][0])
    assert rows_found.selection is not None
    assert cosine(rows_found.selection.x[:1], rows_found.x[:1]).item() > SIMILARITY


def test_rows_of_a_convolution_are_no_images():
    config = FirstLayerWeights()
    with pytest.raises(InputError, match="needs a first layer that is connected to the full input"):
        attack(released("convnet:1x8x8-4-1"), None, config)


def test_points_in_a_plane_are_grouped_by_distance():
    """On one ray every cosine is 1; as points they are two."""
    x = torch.tensor([[1.0, 0.0], [1.01, 0.0], [3.0, 0.0], [1.005, 0.0]], dtype=torch.float64)
    candidates = reconstruction(
        x, torch.ones(4), torch.tensor([1.0, 0.9, 0.8, 0.7]), torch.tensor([0, 1, 0, 1])
    )
    chosen = select(candidates)
    assert sorted(chosen.members.tolist()) == [1, 3]
