"""The canonical form of a network: the same function, whatever the scale of its neurons."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

import residuum as rs
from residuum.auditing.case import load_case
from residuum.io.checkpoints import as_network
from residuum.networks import balance
from residuum.networks.canonical import attacked_form, canonical
from residuum.networks.network import Network
from residuum.networks.probing import probe_inputs
from residuum.records import Knowledge
from tests.victims import knowledge, leaky

MLPS = (
    "mlp:5-7-1",
    "mlp:5-7-6-3",
    "mlp:5-7-6-3,bias=all",
    "mlp:5-7-6-2,bias=none",
    "mlp:5-4-6-5-4-1,bias=hidden",
    "mlp:5-7-6-2,activation=leaky_relu",
    "mlp:5-7-6-2,activation=linear",
)
CONVNETS = ("convnet:2x8x8-4-6-3", "convnet:1x8x8-4-1,bias=all", "convnet:1x7x5-3-4-2,bias=none")


def random_network(arch: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> Network:
    torch.manual_seed(seed)
    module = rs.Network({}, arch).architecture.build().to(dtype)
    return Network({name: t.clone() for name, t in module.state_dict().items()}, arch)


def layers_of(network: Network) -> list[str]:
    return [name.removesuffix(".weight") for name in network.theta if name.endswith(".weight")]


def rescaled(network: Network, spread: float, seed: int = 1, bias: bool = True) -> Network:
    """Multiply incoming weights of hidden neurons by exp(spread N(0, 1)) and divide outgoing ones."""
    theta, generator = dict(network.theta), torch.Generator().manual_seed(seed)
    names = layers_of(network)
    for lower, upper in itertools.pairwise(names):
        weight, above = theta[f"{lower}.weight"], theta[f"{upper}.weight"]
        a = torch.exp(spread * torch.randn(len(weight), generator=generator, dtype=torch.float64))
        theta[f"{lower}.weight"] = (weight * a.reshape(-1, *[1] * (weight.ndim - 1))).to(weight)
        if bias and f"{lower}.bias" in theta:
            theta[f"{lower}.bias"] = (theta[f"{lower}.bias"] * a).to(weight)
        positions = above.reshape(len(above), len(a), -1) / a[:, None]
        theta[f"{upper}.weight"] = positions.reshape(above.shape).to(weight)
    return network.replace(theta=theta)


def outputs(network: Network) -> Tensor:
    x = probe_inputs(network.architecture.inputs)
    x = x.reshape(-1, *network.input_shape) if network.live is not None else x
    with torch.no_grad():
        return network.double_module(x)


def same_function(a: Network, b: Network, tolerance: float = 1e-12) -> bool:
    difference = (outputs(a) - outputs(b)).abs().max()
    return bool(difference <= tolerance * outputs(a).abs().max())


def norms(network: Network, layer: int) -> tuple[Tensor, Tensor]:
    """Norms of the incoming weights with the bias, and of the outgoing weights, of a hidden layer."""
    lower, upper = layers_of(network)[layer : layer + 2]
    incoming = network.theta[f"{lower}.weight"].flatten(1).square().sum(1)
    if f"{lower}.bias" in network.theta:
        incoming = incoming + network.theta[f"{lower}.bias"].square()
    above = network.theta[f"{upper}.weight"]
    outgoing = above.reshape(len(above), len(incoming), -1).square().sum((0, 2))
    return incoming.sqrt(), outgoing.sqrt()


@pytest.mark.parametrize("arch", [*MLPS, *CONVNETS])
def test_function_is_the_same_and_every_neuron_is_balanced(arch: str) -> None:
    network = random_network(arch)
    form = canonical(network)
    assert form is not network
    assert form.arch == network.arch
    assert same_function(network, form)
    for layer in range(len(layers_of(network)) - 1):
        incoming, outgoing = norms(form, layer)
        assert torch.allclose(incoming, outgoing, rtol=1e-10, atol=0)


@pytest.mark.parametrize("arch", [*MLPS, *CONVNETS])
@pytest.mark.parametrize("spread", [0.3, 2.0, 8.0])
def test_the_scale_of_neurons_does_not_matter(arch: str, spread: float) -> None:
    network = random_network(arch, seed=3)
    form, other = canonical(network), canonical(rescaled(network, spread))
    for name, t in form.theta.items():
        assert torch.allclose(t, other.theta[name], rtol=1e-9, atol=1e-12 * float(t.abs().max()))


def test_the_order_of_neurons_is_kept() -> None:
    network = random_network("mlp:5-7-6-1")
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    theta = dict(network.theta)
    theta["layers.0.weight"] = theta["layers.0.weight"][order]
    theta["layers.0.bias"] = theta["layers.0.bias"][order]
    theta["layers.1.weight"] = theta["layers.1.weight"][:, order]
    permuted = canonical(network.replace(theta=theta)).theta["layers.0.weight"]
    assert torch.allclose(permuted, canonical(network).theta["layers.0.weight"][order], rtol=1e-10)


def naive_balance(network: Network, sweeps: int = 400) -> dict[str, Tensor]:
    """Balance one neuron after another with Python numbers, as the definition reads."""
    theta = {name: t.tolist() for name, t in network.theta.items()}
    names = layers_of(network)
    for _ in range(sweeps):
        for lower, upper in itertools.pairwise(names):
            weight, above = theta[f"{lower}.weight"], theta[f"{upper}.weight"]
            bias = theta.get(f"{lower}.bias")
            for j in range(len(weight)):
                squares = [w * w for w in weight[j]] + ([bias[j] ** 2] if bias else [])
                incoming = math.sqrt(math.fsum(squares))
                outgoing = math.sqrt(math.fsum(row[j] ** 2 for row in above))
                a = math.sqrt(outgoing / incoming)
                weight[j] = [w * a for w in weight[j]]
                if bias:
                    bias[j] *= a
                for row in above:
                    row[j] /= a
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in theta.items()}


@pytest.mark.parametrize("arch", MLPS)
def test_a_naive_reference_gives_the_same_weights(arch: str) -> None:
    network = rescaled(random_network(arch, seed=5), 1.0)
    reference = naive_balance(network)
    for name, t in canonical(network).theta.items():
        assert torch.allclose(t, reference[name], rtol=1e-9, atol=1e-12)


def test_the_balanced_form_has_the_smallest_weights() -> None:
    network = canonical(random_network("mlp:5-7-6-5-2,bias=hidden"))
    least = sum(float(t.square().sum()) for t in network.theta.values())
    for seed in range(20):
        other = rescaled(network, 0.01, seed)
        # The bias of the last layer does not change with the scale of any neuron.
        assert sum(float(t.square().sum()) for t in other.theta.values()) > least


def test_a_bias_is_part_of_its_neuron() -> None:
    """Negative control: weights rescaled without their biases are another function."""
    network = random_network("mlp:5-7-6-1,bias=hidden")
    assert same_function(network, rescaled(network, 1.0))
    assert not same_function(network, rescaled(network, 1.0, bias=False), tolerance=0.01)
    assert not same_function(network, canonical(rescaled(network, 1.0, bias=False)), tolerance=0.01)
    assert canonical(network).theta["layers.2.weight"].shape == (1, 6)


def with_dead_neurons(network: Network, seed: int = 0) -> Network:
    """Add three neurons without outgoing and two without incoming weights to every hidden layer."""
    torch.manual_seed(seed)
    theta = dict(network.theta)
    names = layers_of(network)
    for lower, upper in itertools.pairwise(names):
        weight, above = theta[f"{lower}.weight"], theta[f"{upper}.weight"]
        new = torch.randn(5, *weight.shape[1:], dtype=weight.dtype)
        new[3:] = 0
        theta[f"{lower}.weight"] = torch.cat([weight, new])
        if (bias := theta.get(f"{lower}.bias")) is not None:
            theta[f"{lower}.bias"] = torch.cat([bias, torch.tensor([1, 2, 3, 0, 0]).to(bias)])
        positions = above.reshape(len(above), len(weight), -1)
        outgoing = torch.randn(len(above), 5, positions.shape[2], dtype=weight.dtype)
        outgoing[:, :3] = 0
        grown = torch.cat([positions, outgoing], 1)
        theta[f"{upper}.weight"] = grown.reshape(len(above), -1, *above.shape[2:])
    arch = network.architecture
    first = 0 if arch.image_shape else 1
    hidden = tuple(width + 5 for width in arch.widths[first:-1])
    text = "-".join(map(str, (*arch.widths[:first], *hidden, arch.widths[-1])))
    image = "x".join(map(str, arch.image_shape or ())) + "-" if arch.image_shape else ""
    options = network.arch.partition(",")[1] + network.arch.partition(",")[2]
    return network.replace(theta=theta, arch=f"{arch.kind}:{image}{text}{options}")


@pytest.mark.parametrize("arch", [*MLPS, *CONVNETS])
def test_dead_neurons_are_left_out(arch: str) -> None:
    network = random_network(arch, seed=2)
    grown = with_dead_neurons(network)
    assert same_function(network, grown)
    form = canonical(rescaled(grown, 2.0))
    dropped = 5 * (len(layers_of(network)) - 1)
    assert form.arch == network.arch
    assert form.assumptions == (
        f"{dropped} neurons without incoming or outgoing weights were left out and the others were "
        "rescaled before the attacks. The network computes the same function.",
    )
    assert {name: t.shape for name, t in form.theta.items()} == {
        name: t.shape for name, t in network.theta.items()
    }
    for name, t in canonical(network).theta.items():
        assert torch.allclose(form.theta[name], t, rtol=1e-9, atol=1e-12)


def test_neurons_that_feed_only_dead_neurons_are_dead() -> None:
    network = random_network("mlp:5-7-6-1")
    theta = {name: t.clone() for name, t in network.theta.items()}
    theta["layers.2.weight"][:, :2] = 0
    theta["layers.1.weight"][2:, 3] = 0
    form = canonical(network.replace(theta=theta))
    assert form.architecture.widths == (5, 6, 4, 1)
    assert same_function(network.replace(theta=theta), form)


def test_a_neuron_with_only_a_bias_is_kept() -> None:
    network = random_network("mlp:5-7-1")
    network.theta["layers.0.weight"][0] = 0
    network.theta["layers.0.bias"][0] = 1.0
    form = canonical(network)
    assert form.architecture.widths == (5, 7, 1)
    assert same_function(network, form)


def test_balanced_networks_stay_as_they_are() -> None:
    for dtype in (torch.float64, torch.float32):
        form = canonical(rescaled(random_network("mlp:5-7-6-1,bias=hidden", dtype=dtype), 2.0))
        assert canonical(form) is form
        assert form.theta["layers.0.weight"].dtype == dtype


def test_small_changes_are_not_reported() -> None:
    form = canonical(random_network("mlp:5-7-6-1"))
    nearly = rescaled(form, 0.01)
    assert canonical(nearly) is not nearly
    assert canonical(nearly).assumptions == form.assumptions
    assumptions = canonical(rescaled(form.replace(assumptions=("a guess",)), 1.0)).assumptions
    assert assumptions[0] == "a guess"
    assert assumptions[1].startswith("neurons were rescaled before the attacks.")


def test_facts_about_the_network_are_kept() -> None:
    network = rescaled(random_network("mlp:6-7-2"), 2.0).replace(
        input_shape=(1, 2, 3), labels=("cat", "dog"), task="regression", source_names={"a": "b"}
    )
    form = canonical(network)
    for name in ("input_shape", "labels", "task", "source_names"):
        assert getattr(form, name) == getattr(network, name)


@pytest.mark.parametrize(
    "arch",
    [
        *(f"mlp:5-7-6-1,activation={name}" for name in ("gelu", "silu", "tanh", "sigmoid", "elu")),
        "convnet:1x8x8-4-1,activation=tanh",
        "polynomial:5-7-1,coefficients=0/0/0/1",
        "mlp:5-1",
    ],
)
def test_other_networks_are_returned_as_they_are(arch: str) -> None:
    network = random_network(arch)
    assert canonical(network) is network


def test_constant_and_broken_networks_are_returned_as_they_are() -> None:
    network = random_network("mlp:5-7-1")
    for value in (0.0, math.nan, math.inf):
        theta = {name: torch.full_like(t, value) for name, t in network.theta.items()}
        broken = network.replace(theta=theta)
        assert canonical(broken) is broken


def test_extreme_scales_are_undone() -> None:
    network = random_network("mlp:5-7-6-1")
    form = canonical(rescaled(network, 120.0))  # up to 1e100 and more
    for name, t in canonical(network).theta.items():
        assert torch.allclose(form.theta[name], t, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_coarse_number_formats_lose_nothing(dtype: torch.dtype) -> None:
    """Half precision becomes float32, so that rescaling adds no noise to the weights."""
    network = random_network("mlp:5-7-6-1", dtype=dtype)
    form = canonical(network)
    assert {t.dtype for t in form.theta.values()} == {torch.float32}
    assert same_function(network, form, tolerance=1e-5)


# Live modules


def live(module: nn.Module, shape: tuple[int, ...]) -> Network:
    """A network of a module that no architecture string describes."""
    network = as_network(module.double(), shape=shape)
    assert network.live is not None
    return network


def pooled_convnet(pool: Callable[[], nn.Module] = lambda: nn.MaxPool2d(2)) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        pool(),
        nn.Sequential(nn.Conv2d(4, 6, 3), nn.LeakyReLU(0.2), nn.Dropout(0.5)),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 5),
        nn.PReLU(),
        nn.Linear(5, 3),
    )


@pytest.mark.parametrize("pool", [lambda: nn.MaxPool2d(2), lambda: nn.AvgPool2d(2)])
def test_live_sequences_are_balanced(pool: Callable[[], nn.Module]) -> None:
    network = live(pooled_convnet(pool), (1, 8, 8))
    form = canonical(network)
    assert form is not network
    assert same_function(network, form)
    assert form.theta.keys() == network.theta.keys()
    for lower, upper in (("0", "3.0"), ("3.0", "6"), ("6", "8")):
        weight, above = form.theta[f"{lower}.weight"], form.theta[f"{upper}.weight"]
        incoming = weight.flatten(1).square().sum(1) + form.theta[f"{lower}.bias"].square()
        outgoing = above.reshape(len(above), len(weight), -1).square().sum((0, 2))
        assert torch.allclose(incoming, outgoing, rtol=1e-10)
    assert canonical(form) is form


def test_dead_channels_of_a_live_module_become_zero() -> None:
    module = pooled_convnet()
    with torch.no_grad():
        module[3][0].weight[:, 1] = 0  # channel 1 of the first layer goes nowhere
    network = live(module, (1, 8, 8))
    form = canonical(network)
    assert form.arch == network.arch
    assert not form.theta["0.weight"][1].any()
    assert form.theta["0.weight"][0].any()
    assert same_function(network, form)
    assert "1 neuron without incoming or outgoing weights was set to zero" in form.assumptions[-1]


class Doubling(nn.Sequential):
    """A sequence with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


UNTOUCHED: dict[str, Callable[[], nn.Module]] = {
    "forward": lambda: Doubling(*pooled_convnet()),
    "batch norm": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)
    ),
    "smooth": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2)
    ),
    "bounded": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU6(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2)
    ),
    "groups": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 2)
    ),
    "rows": lambda: nn.Sequential(
        nn.Linear(8, 4), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4), nn.ReLU(), nn.Linear(4, 2)
    ),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_other_live_modules_are_returned_as_they_are(name: str) -> None:
    torch.manual_seed(0)
    network = live(UNTOUCHED[name](), (1, 8, 8))
    assert canonical(network) is network


def test_shared_layers_are_not_rescaled() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 2, 3, padding=1)
    module = nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Flatten(), nn.Linear(128, 1))
    network = live(module, (2, 8, 8))
    assert canonical(network) is network


def test_an_activation_may_be_shared() -> None:
    torch.manual_seed(0)
    relu, pool = nn.ReLU(), nn.MaxPool2d(2)
    block = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), relu, pool)
    module = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), relu, pool, block, nn.Flatten(), nn.Linear(16, 1)
    )
    network = live(module, (2, 8, 8))
    assert canonical(network) is not network
    assert same_function(network, canonical(network))


# In an audit


def test_known_weights_keep_the_parametrization() -> None:
    network = rescaled(random_network("mlp:5-7-1"), 2.0)
    assert attacked_form(network, Knowledge()) is not network
    assert attacked_form(network, Knowledge(theta0=network.theta)) is network
    assert attacked_form(network, Knowledge(moment=network.theta)) is network


@lru_cache(maxsize=2)
def audit(spread: float) -> rs.AuditResult:
    network, split = leaky()
    return rs.audit(
        rescaled(network, spread) if spread else network,
        data=split.train,
        holdout=split.holdout,
        knowledge=knowledge(split),
        attacks=[{"attack": "binary-kkt", "restarts": 1, "steps": 20}],
        subsets=200,
        baselines=False,
        positive_controls=False,
    )


def test_an_audit_attacks_rescaled_weights_like_the_original_ones() -> None:
    original, other = audit(0.0), audit(2.0)
    for a, b in zip(original.reconstructions, other.reconstructions, strict=True):
        assert a.attack == b.attack
        if a.attack == "binary-kkt":
            assert torch.allclose(a.loss[:, 0], b.loss[:, 0], rtol=1e-4)
            assert torch.allclose(a.x, b.x, atol=1e-2)
        assert a.canonical
        assert b.canonical
    residuals = [
        next(row.residual for row in result.attacks if row.name == "binary-kkt")
        for result in (original, other)
    ]
    assert residuals[0] == pytest.approx(residuals[1], rel=1e-2)


def test_reports_are_about_the_weights_in_the_file() -> None:
    network, _ = leaky()
    other = audit(2.0)
    assert other.checkpoint.arch == network.arch
    assert torch.equal(
        other.checkpoint.theta["layers.0.weight"],
        rescaled(network, 2.0).theta["layers.0.weight"],
    )
    assert other.inspection.balance == pytest.approx(balance(rescaled(network, 2.0).double_module))
    assert any(note.startswith("neurons were rescaled before the attacks") for note in other.notes)
    assert other.checkpoint.assumptions == network.assumptions


def test_certificates_use_the_weights_to_which_multipliers_belong() -> None:
    network, _ = leaky()
    reconstruction = next(r for r in audit(2.0).reconstructions if r.attack == "binary-kkt")
    unique = rs.uniqueness(rescaled(network, 2.0), reconstruction, candidates="best", samples=1)
    reference = rs.uniqueness(
        canonical(network), reconstruction.replace(canonical=False), candidates="best", samples=1
    )
    assert unique.best_residual == pytest.approx(reference.best_residual, rel=1e-4)


def test_a_case_with_known_initial_weights_is_attacked_as_it_is() -> None:
    network, split = leaky()
    other = rescaled(network, 2.0)
    start = {name: torch.zeros_like(t) for name, t in other.theta.items()}
    cases = [
        load_case(other, split.train, knowledge=knowledge) for knowledge in ({}, {"theta0": start})
    ]
    assert [case is not None and case.attacked is case.audited for case in cases] == [False, True]
