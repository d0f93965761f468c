"""Networks: derivatives against autograd, descriptions, recognition, homogeneity."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from residuum.errors import ArchitectureError, CheckpointError
from residuum.networks import (
    ACTIVATIONS,
    MLP,
    SURROGATES,
    Activation,
    Architecture,
    ConvNet,
    Linear,
    Polynomial,
    PolynomialNetwork,
    ReLU,
    SigmoidReLU,
    Softplus,
    balance,
    homogeneity_order,
    match_architecture,
    probe_inputs,
    recognize,
    refuse_by_name,
    with_surrogate,
)

EXAMPLES: dict[str, Callable[[], Activation]] = {
    **{name: kind for name, kind in ACTIVATIONS.items() if issubclass(kind, Activation)},
    **SURROGATES,
    "softplus-1": lambda: Softplus(1.0),
    "sigmoid-3": lambda: SigmoidReLU(3.0),
    "cubic": lambda: Polynomial((0, 0, 0, 1)),
    "mixed": lambda: Polynomial((0.5, -1, 0, 2, 0.25)),
    "line": lambda: Polynomial((1, 2)),
}
Z = torch.tensor([-2.0, -0.31, -0.02, -1e-3, 1e-3, 0.01, 0.3, 1.7], dtype=torch.float64)


def seeded(arch: str, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Architecture.parse(arch).build().double()


def inputs(n: int, d: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64)


# Activations


def test_derivatives_are_those_of_autograd() -> None:
    for name in EXAMPLES:
        activation = EXAMPLES[name]()
        z = Z.clone().requires_grad_()
        (first,) = torch.autograd.grad(activation(z).sum(), z, create_graph=True)
        torch.testing.assert_close(activation.derivative(Z), first.detach(), rtol=1e-13, atol=1e-15)
        second = torch.zeros_like(Z)
        if first.requires_grad:
            (second,) = torch.autograd.grad(first.sum(), z)
        torch.testing.assert_close(activation.second_derivative(Z), second, rtol=1e-11, atol=1e-13)


def test_second_derivative_by_finite_differences() -> None:
    for name in EXAMPLES:
        activation, h = EXAMPLES[name](), 1e-6
        slope = (activation.derivative(Z + h) - activation.derivative(Z - h)) / (2 * h)
        torch.testing.assert_close(activation.second_derivative(Z), slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["relu", "linear", "softplus", "softplus-1", "cubic", "mixed"])
def test_first_derivative_by_finite_differences(name: str) -> None:
    activation, h = EXAMPLES[name](), 1e-7
    slope = (activation(Z + h) - activation(Z - h)) / (2 * h)
    torch.testing.assert_close(activation.derivative(Z), slope, rtol=1e-6, atol=1e-7)


def test_values() -> None:
    relu = torch.tensor([max(float(z), 0.0) for z in Z], dtype=torch.float64)
    assert torch.equal(ReLU()(Z), relu)
    assert torch.equal(SigmoidReLU()(Z), relu)
    assert torch.equal(Linear()(Z), Z)
    soft = torch.tensor([math.log1p(math.exp(5 * float(z))) / 5 for z in Z], dtype=torch.float64)
    torch.testing.assert_close(Softplus(5)(Z), soft, rtol=1e-14, atol=0)
    poly = torch.from_numpy(np.polynomial.Polynomial((0.5, -1, 0, 2, 0.25))(Z.numpy()))
    torch.testing.assert_close(Polynomial((0.5, -1, 0, 2, 0.25))(Z), poly, rtol=1e-14, atol=1e-15)
    assert ReLU().derivative(torch.zeros(1)) == 0
    assert SigmoidReLU().derivative(torch.zeros(1)) == 0.5
    large = Softplus(50.0)(torch.tensor([1e4, -1e4]))
    assert large.tolist() == [1e4, 0.0]


def test_softplus_passes_gradcheck() -> None:
    z = Z.clone().requires_grad_()
    assert torch.autograd.gradcheck(Softplus(4.0), (z,))
    assert torch.autograd.gradgradcheck(Softplus(4.0), (z,))


def formal(z: Tensor, alpha: float) -> Tensor:
    """A function with relu's values and the surrogate's derivatives, written without a custom rule.

    relu(z) = [relu(z) - s(z)] + s(z) with the bracket cut off from the graph and s' = sigmoid(alpha z).
    """
    smooth = torch.nn.functional.softplus(alpha * z, threshold=500) / alpha
    return (z.clamp_min(0) - smooth).detach() + smooth


@pytest.mark.parametrize("alpha", [3.0, 150.0])
def test_sigmoid_relu_under_every_transform(alpha: float) -> None:
    surrogate = SigmoidReLU(alpha)
    w, x = inputs(4, 3), inputs(5, 3, 2) / 10

    def network(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda sample: (f(w @ sample) * torch.arange(1.0, 5.0).double()).sum()

    ours, naive = network(surrogate), network(lambda z: formal(z, alpha))
    for transform in (grad, jacrev, jacfwd, hessian):
        outputs = torch.stack([transform(ours)(sample) for sample in x])
        expected = torch.stack([transform(naive)(sample) for sample in x])
        torch.testing.assert_close(outputs, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(vmap(transform(ours))(x), expected, rtol=1e-10, atol=1e-12)
    assert hessian(ours)(x[0]).abs().max() > 1e-3
    tangent = inputs(1, 3, 3)[0]
    value, change = jvp(ours, (x[0],), (tangent,))
    assert value == ours(x[0])
    torch.testing.assert_close(change, grad(naive)(x[0]) @ tangent, rtol=1e-12, atol=1e-14)
    forward_over_reverse = jvp(grad(ours), (x[0],), (tangent,))[1]
    torch.testing.assert_close(
        forward_over_reverse, hessian(naive)(x[0]) @ tangent, rtol=1e-10, atol=1e-12
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP((9, 6, 5, 1)),
    "convnet": lambda: ConvNet((1, 3, 3), (2, 3), 1),
    "sequential": lambda: nn.Sequential(
        nn.Flatten(),
        nn.Linear(9, 6),
        nn.ReLU(),
        nn.Sequential(nn.Linear(6, 5), nn.ReLU()),
        nn.Linear(5, 1),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_surrogates_replace_every_relu(name: str) -> None:
    model, x = MODELS[name]().double(), inputs(4, 9)
    changed = with_surrogate(model, SigmoidReLU(2.0))
    assert torch.equal(changed(x), model(x))
    theta = dict(model.named_parameters())
    first = next(iter(theta))

    def gradient(network: nn.Module) -> Tensor:
        return grad(lambda t: functional_call(network, t, (x,)).sum())(theta)[first]

    assert not torch.allclose(gradient(changed), gradient(model))
    sharp = with_surrogate(model, SigmoidReLU(1e9))
    torch.testing.assert_close(gradient(sharp), gradient(model), rtol=1e-10, atol=1e-12)
    soft = with_surrogate(model, Softplus(1.0))
    assert not torch.allclose(soft(x), model(x))
    before = model(x)
    next(iter(changed.parameters())).data.zero_()
    assert not theta[first].any()  # weights are shared, and the network itself is as it was
    assert not torch.equal(model(x), before)
    assert "forward" not in vars(model)


def test_networks_without_kinks_stay_as_they_are() -> None:
    x = inputs(3, 2)
    for model in (
        nn.Linear(2, 1).double(),
        MLP((2, 2, 1), activation=Linear()).double(),
        PolynomialNetwork(2, 2, Softplus()).double(),
    ):
        assert torch.equal(with_surrogate(model, Softplus(1.0))(x), model(x))


@pytest.mark.parametrize("coefficients", [(), (1,), (1, 0), (0, 1, 0)])
def test_polynomials_need_a_degree(coefficients: tuple[float, ...]) -> None:
    with pytest.raises(ArchitectureError, match="degree"):
        Polynomial(coefficients)
    assert Polynomial((0, 1, 3)).degree == 2


# Descriptions

widths = st.lists(st.integers(1, 3000), min_size=2, max_size=6).map(tuple)
biases = st.sampled_from(["first", "hidden", "all", "none"])
activations = st.sampled_from(sorted(ACTIVATIONS))
numbers = st.floats(-1e6, 1e6, allow_nan=False) | st.integers(-9, 9).map(float)
LAYERED = st.fixed_dictionaries({"bias": biases, "activation": activations})


def written(numbers: list[float]) -> dict[str, str]:
    """Coefficients in the shortest form that reads back as the same numbers."""
    coefficients = (str(int(c)) if c.is_integer() else repr(c) for c in numbers)
    return {"coefficients": "/".join(coefficients)}


ARCHITECTURES = st.one_of(
    st.builds(Architecture, st.just("mlp"), widths, options=LAYERED),
    st.builds(
        Architecture,
        st.just("convnet"),
        widths,
        image_shape=st.tuples(*[st.integers(1, 64)] * 3),
        options=LAYERED,
    ),
    st.builds(
        Architecture,
        st.just("polynomial"),
        st.tuples(st.integers(1, 99), st.integers(1, 99), st.just(1)),
        options=st.lists(numbers, min_size=2, max_size=6).map(written),
    ),
)


@given(arch=ARCHITECTURES)
def test_descriptions_round_trip(arch: Architecture) -> None:
    assert Architecture.parse(str(arch)) == arch
    assert str(Architecture.parse(f"  {arch}\n")) == str(arch)


@given(
    text=st.text(max_size=40) | st.from_regex(r"(mlp|convnet|polynomial):[0-9x-]{0,12}(,\w+=\w*)?")
)
def test_any_text_parses_or_is_an_architecture_error(text: str) -> None:
    parsed = parse_or_error(text)
    if isinstance(parsed, ArchitectureError):
        assert parsed.remedy
    else:
        assert Architecture.parse(str(parsed)) == parsed


def parse_or_error(text: str) -> Architecture | ArchitectureError:
    try:
        return Architecture.parse(text)
    except ArchitectureError as problem:
        return problem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must have the form kind:width"),
        ("mlp", "must have the form kind:width"),
        ("mlp:5", "must have the form kind:width"),
        ("mlp:5-", "must have the form kind:width"),
        ("mpl:5-1", "Did you mean 'mlp'"),
        ("mlp:5-0-1", "between 1"),
        ("mlp:5x5-1", "one input width"),
        ("convnet:5-3-1", "CxHxW"),
        ("convnet:1x5x5-1", "convolution"),
        ("mlp:5-1,bais=all", "Did you mean 'bias'"),
        ("mlp:5-1,bias=al", "Did you mean 'all'"),
        ("mlp:5-1,activation=reul", "Did you mean 'relu'"),
        ("polynomial:5-3-2", "polynomial:64-36-1"),
        ("polynomial:5-1", "polynomial:64-36-1"),
        ("polynomial:5-3-1,coefficients=a/b", "finite"),
        ("polynomial:5-3-1,coefficients=0/inf", "finite"),
        ("polynomial:5-3-1,bias=all", "no option"),
        ("mlp:" + "9-" * 2000 + "1", "characters"),
        ("mlp:99999999999-1", "between 1"),
    ],
)
def test_wrong_descriptions(text: str, words: str) -> None:
    with pytest.raises(ArchitectureError) as caught:
        Architecture.parse(text)
    assert words in str(caught.value)
    assert caught.value.remedy


def test_sizes_are_checked_before_building() -> None:
    with pytest.raises(ArchitectureError, match="must have at most"):
        Architecture.parse("mlp:99999-99999-1").build()
    with pytest.raises(ArchitectureError, match="positive"):
        MLP((3, 0, 1))
    with pytest.raises(ArchitectureError, match="degree"):
        Architecture.parse("polynomial:5-3-1,coefficients=0/0").build()


def test_descriptions_build_what_they_say() -> None:
    mlp = Architecture.parse("mlp:5-7-6-2,bias=hidden").build()
    shapes = {name: tuple(p.shape) for name, p in mlp.named_parameters()}
    assert shapes == {
        "layers.0.weight": (7, 5),
        "layers.0.bias": (7,),
        "layers.1.weight": (6, 7),
        "layers.1.bias": (6,),
        "layers.2.weight": (2, 6),
    }
    arch = Architecture.parse("convnet:2x5x7-3-4-2")
    assert (arch.inputs, arch.outputs) == (70, 2)
    net = arch.build()
    x = torch.randn(3, 70)
    assert net(x).shape == (3, 2)
    assert torch.equal(net(x), net(x.reshape(3, 2, 5, 7)))
    naive = x.reshape(3, 2, 5, 7)
    for layer in net.convolutions:
        naive = torch.relu(
            torch.nn.functional.conv2d(naive, layer.weight, layer.bias, stride=2, padding=1)
        )
    torch.testing.assert_close(net(x), naive.flatten(1) @ net.head.weight.T)
    assert [c.bias is not None for c in net.convolutions] == [True, False]


def test_polynomial_network_is_its_formula() -> None:
    model, x = seeded("polynomial:4-6-1,coefficients=1/0/-2/0.5"), inputs(3, 4)
    for i in range(3):
        total = 0.0
        for w, a in zip(model.weight, model.coefficient, strict=True):
            t = float(w.detach() @ x[i])
            total += float(a.detach()) * (1 - 2 * t**2 + 0.5 * t**3)
        assert float(model(x)[i, 0].detach()) == pytest.approx(total, rel=1e-12)


# Traces and signals


@pytest.mark.parametrize("bias", ["first", "hidden", "all", "none"])
def test_traces_and_signals_against_autograd(bias: str) -> None:
    for surrogate in [None, "sigmoid", "softplus"]:
        model = seeded(f"mlp:5-7-6-3,bias={bias}")
        if surrogate is not None:
            model.activation = SURROGATES[surrogate](3.0)
        assert isinstance(model, MLP)
        x = inputs(4, 5)
        trace = model.trace(x)
        h = x
        for layer, linear in enumerate(model.linears):
            assert torch.equal(trace.inputs[layer], h)
            z = h @ linear.weight.T + (linear.bias if linear.bias is not None else 0)
            torch.testing.assert_close(trace.pre[layer], z, rtol=1e-13, atol=1e-14)
            h = model.activation(trace.pre[layer])
        assert torch.equal(trace.output, model(x))
        index = torch.tensor([0, 2, 2, 3, 1])
        covectors = inputs(5, 3, 4)
        signals = model.signals(trace, covectors, index)
        for r, i in enumerate(index.tolist()):
            pre = [p[i] for p in trace.pre]
            value = covectors[r] @ trace.output[i]
            expected = torch.autograd.grad(value, trace.pre, retain_graph=True)
            for signal, gradient, p in zip(signals, expected, pre, strict=True):
                assert signal[r].shape == p.shape
                torch.testing.assert_close(signal[r], gradient[i], rtol=1e-12, atol=1e-14)
        plain = model.signals(trace, covectors[:4])
        signals_few = model.signals(trace, covectors[:4], torch.arange(4))
        assert all(torch.equal(a, b) for a, b in zip(plain, signals_few, strict=True))


def test_images_are_flattened() -> None:
    model, x = MLP((12, 3, 1)), torch.randn(2, 3, 2, 2)
    assert torch.equal(model(x), model(x.reshape(2, 12)))


# Homogeneity and balance


@pytest.mark.parametrize(
    ("arch", "order"),
    [
        ("mlp:6-1", 1.0),
        ("mlp:6-5-1", 2.0),
        ("mlp:6-5-4-1", 3.0),
        ("mlp:6-5-4-3-2", 4.0),
        ("mlp:6-5-4-1,bias=none", 3.0),
        ("mlp:6-5-4-1,bias=none,activation=linear", 3.0),
        ("mlp:6-5-1,bias=hidden", 2.0),
        ("mlp:6-5-4-1,bias=hidden", None),
        ("mlp:6-5-1,bias=all", None),
        ("convnet:1x2x3-3-2-1", 3.0),
        ("convnet:1x2x3-3-2-1,bias=hidden", None),
        ("polynomial:6-4-1", 4.0),
        ("polynomial:6-4-1,coefficients=0/0/2", 3.0),
        ("polynomial:6-4-1,coefficients=0/1/0/1", None),
        ("polynomial:6-4-1,coefficients=1/0/1", None),
    ],
)
def test_homogeneity_is_measured(arch: str, order: float | None) -> None:
    for seed in range(3):
        model = seeded(arch, seed)
        assert homogeneity_order(model, probe_inputs(6)) == order
        assert homogeneity_order(model.float(), probe_inputs(6)) == order


def test_a_measured_order_is_the_exponent() -> None:
    model, x = seeded("mlp:6-5-4-1"), inputs(7, 6)
    before = model(x)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.7)
    torch.testing.assert_close(model(x), 1.7**3 * before, rtol=1e-12, atol=0)


def test_homogeneity_of_degenerate_networks() -> None:
    model = seeded("mlp:6-5-1")
    with torch.no_grad():
        model.layers[1].weight.zero_()
    assert homogeneity_order(model, probe_inputs(6)) is None
    assert homogeneity_order(MLP((6, 5, 1), activation=Softplus(1.0)), probe_inputs(6)) is None
    assert torch.equal(probe_inputs(6), probe_inputs(6))


def test_balance_ignores_permutations_and_sees_rescaling() -> None:
    model = seeded("mlp:6-5-1")
    assert isinstance(model, MLP)
    with torch.no_grad():
        size = (model.layers[0].weight.square().sum(1) + model.layers[0].bias.square()).sqrt()
        model.layers[1].weight.copy_(size[None])
        assert balance(model) == pytest.approx(0, abs=1e-14)
        model.layers[0].weight.mul_(2), model.layers[0].bias.mul_(2)
        assert balance(model) == pytest.approx(0.75, rel=1e-12)
        order = torch.tensor([3, 1, 4, 0, 2])
        for p in (model.layers[0].weight, model.layers[0].bias):
            p.copy_(p[order].clone())
        model.layers[1].weight.copy_(model.layers[1].weight[:, order].clone())
        assert balance(model) == pytest.approx(0.75, rel=1e-12)
        for p in model.parameters():
            p.zero_()
    assert balance(model) is None
    assert balance(MLP((3, 1))) is None


# Recognition


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=7, unique=True),
    bias=biases,
    random=st.randoms(use_true_random=False),
)
def test_any_order_of_a_chain_of_distinct_widths_is_recognized(
    sizes: list[int], bias: str, random: object
) -> None:
    arch = Architecture("mlp", tuple(sizes), None, {"bias": bias})
    state = dict(arch.build().state_dict())
    stems = [
        f"{word}{i}" for i, word in enumerate(["zeta", "alpha", "body", "head", "fc", "out", "in"])
    ]
    random.shuffle(stems)  # type: ignore[attr-defined]
    renamed = {
        f"{stems[int(name.split('.')[1])]}.{name.split('.')[2]}": t for name, t in state.items()
    }
    items = list(renamed.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    recognized, names = recognize(dict(items))
    assert recognized.widths == arch.widths
    assert {ours: renamed[theirs].data_ptr() for ours, theirs in names.items()} == {
        ours: t.data_ptr() for ours, t in state.items()
    }
    assert recognized.build().state_dict().keys() == state.keys()
    assert match_architecture(dict(items), arch) == names


def test_equal_widths_follow_the_names() -> None:
    state = {f"fc{i}.weight": torch.full((4, 4), float(i)) for i in (10, 2, 1)}
    arch, names = recognize(state)
    assert str(arch) == "mlp:4-4-4-4,bias=none"
    assert list(names.values()) == ["fc1.weight", "fc2.weight", "fc10.weight"]


def test_biases_without_a_stem_go_by_size() -> None:
    state = {
        "w1": torch.ones(7, 5),
        "b1": torch.ones(7),
        "w2": torch.ones(2, 7),
        "b2": torch.ones(2),
    }
    arch, names = recognize(state)
    assert str(arch) == "mlp:5-7-2,bias=all"
    assert names["layers.1.bias"] == "b2"


@pytest.mark.parametrize(
    "shapes",
    [{}, {"b": (3,)}, {"w": (3, 2), "v": (5, 4)}, {"w": (3, 2), "b": (4,)}, {"w": (3, 2), "s": ()}],
)
def test_other_states_are_not_recognized(shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(CheckpointError, match="form no chain of layers") as caught:
        recognize({name: torch.ones(shape) for name, shape in shapes.items()})
    assert "layers.0.weight, layers.0.bias" in caught.value.remedy


def test_names_in_the_order_of_the_layers_are_recognized() -> None:
    """What the remedy of an unknown order asks for."""
    square = {f"{name}.weight": torch.ones(4, 4) for name in ("b", "a")}
    state = {"z.weight": torch.ones(4, 3), **square, "c.weight": torch.ones(2, 4)}
    shuffled = {name: state[name] for name in ("c.weight", "b.weight", "z.weight", "a.weight")}
    with pytest.raises(CheckpointError, match="named in the order of its layers"):
        recognize(shuffled)
    order = {"z.weight": 0, "b.weight": 1, "a.weight": 2, "c.weight": 3}
    renamed = {f"layers.{order[name]}.weight": t for name, t in shuffled.items()}
    assert str(recognize(renamed)[0]) == "mlp:3-4-4-4-2,bias=none"


def test_a_bias_rule_of_its_own_is_refused() -> None:
    state = dict(Architecture.parse("mlp:5-7-6-2,bias=hidden").build().state_dict())
    del state["layers.0.bias"]
    with pytest.raises(
        ArchitectureError, match=r"layers that have biases must follow .* layers \[1\] of 3"
    ):
        recognize(state)


def test_convnets_and_polynomials_are_matched_by_shape() -> None:
    for text in ("convnet:1x4x4-2-3-2", "polynomial:4-3-1"):
        arch = Architecture.parse(text)
        state = arch.build().state_dict()
        renamed = {f"{i:02d}.part": t for i, t in enumerate(state.values())}
        names = match_architecture(renamed, arch)
        assert list(names) == list(state)
        assert list(names.values()) == list(renamed)
        with pytest.raises(ArchitectureError, match="must fit"):
            match_architecture({"a": torch.ones(2, 2)}, arch)


@settings(max_examples=60, deadline=None)
@given(bias=biases, head=st.sampled_from(["fc", "classifier"]), random=st.randoms())
def test_convnets_are_matched_whatever_the_order_of_bias_and_weight(
    bias: str, head: str, random: object
) -> None:
    arch = Architecture.parse(f"convnet:1x8x8-4-4-4-2,bias={bias}")
    stems = {"convolutions.0": "conv1", "convolutions.1": "conv2", "convolutions.2": "conv10"}
    theirs = {
        name: f"{stems.get(name.rpartition('.')[0], head)}.{name.rpartition('.')[2]}"
        for name in arch.build().state_dict()
    }
    state = {theirs[name]: t for name, t in arch.build().state_dict().items()}
    for items in (sorted(state.items()), random.sample([*state.items()], len(state))):  # type: ignore[attr-defined]
        assert match_architecture(dict(items), arch) == theirs


def test_weights_of_distinct_shapes_need_no_order() -> None:
    arch = Architecture.parse("convnet:1x8x8-4-6-2,bias=all")
    state = arch.build().state_dict()
    stems = {"convolutions.0": "second", "convolutions.1": "first", "head": "body"}
    theirs = {n: f"{stems[n.rpartition('.')[0]]}.{n.rpartition('.')[2]}" for n in state}
    assert match_architecture({theirs[n]: t for n, t in reversed(state.items())}, arch) == theirs


def test_one_weight_does_not_serve_two_layers() -> None:
    with pytest.raises(ArchitectureError, match="must fit"):
        match_architecture({"w": torch.ones(4, 4)}, Architecture.parse("mlp:4-4-4,bias=none"))


# What cannot be read


def state_of(**modules: nn.Module) -> dict[str, Tensor]:
    return dict(nn.ModuleDict(modules).state_dict())


CNN = state_of(conv1=nn.Conv2d(1, 8, 3), conv2=nn.Conv2d(8, 16, 3), fc=nn.Linear(16 * 49, 10))
RESNET = CNN | state_of(
    bn1=nn.BatchNorm2d(8), layer1=nn.ModuleDict({"shortcut": nn.Conv2d(8, 16, 1)})
)
TRANSFORMER = state_of(
    embed=nn.Embedding(50, 32), body=nn.TransformerEncoderLayer(32, 4, 64), head=nn.Linear(32, 2)
)
ADAPTER = {"fc1.lora_A.weight": torch.ones(4, 784), "fc1.lora_B.weight": torch.ones(128, 4)}
UNREADABLE = {
    "cnn": (CNN, ["convolutions ('conv1.weight' [8, 1, 3, 3] and 1 more)"], "-8-16-10,bias=all"),
    "5x5": (
        CNN | state_of(conv1=nn.Conv2d(1, 8, 5)),
        ["convolutions ('conv1.weight' [8, 1, 5, 5] and 1 more)"],
        "No --arch",
    ),
    "deep head": (CNN | state_of(out=nn.Linear(10, 2)), ["convolutions"], "No --arch"),
    "layer norm": (
        state_of(a=nn.Linear(4, 5), ln=nn.LayerNorm(5), b=nn.Linear(5, 2)),
        ["layer norm ('ln.weight' [5])"],
        "No --arch",
    ),
    "batch norm": (
        state_of(a=nn.Linear(4, 5), bn=nn.BatchNorm1d(5), b=nn.Linear(5, 2)),
        ["batch norm ('bn.running_mean' [5] and 2 more)"],
        "No --arch",
    ),
    "resnet": (
        RESNET,
        ["batch norm ('bn1.running_mean'", "convolutions", "skip connections ('layer1.shortcut"],
        "No --arch",
    ),
    "transformer": (
        TRANSFORMER,
        ["attention", "an embedding ('embed.weight' [50, 32])", "layer norm"],
        "No --arch",
    ),
    "lstm": (
        state_of(rnn=nn.LSTM(8, 16), fc=nn.Linear(16, 2)),
        ["a recurrent layer ('rnn.weight_ih_l0' [64, 8] and 1 more)"],
        "No --arch",
    ),
    "adapter": (
        CNN | ADAPTER,
        ["an adapter ('fc1.lora_A.weight' [4, 784] and 1 more)", "convolutions"],
        "merge_and_unload()",
    ),
}
KINDS = ("batch norm", "convolutions", "layer norm", "attention", "skip", "recurrent", "embedding")


@pytest.mark.parametrize("case", UNREADABLE)
@pytest.mark.parametrize("arch", [None, "mlp:784-128-10", "convnet:1x28x28-8-16-10"])
def test_every_obstacle_is_named_and_no_architecture_made_up(case: str, arch: str | None) -> None:
    state, words, advice = UNREADABLE[case]
    with pytest.raises((CheckpointError, ArchitectureError)) as caught:
        match_architecture(state, Architecture.parse(arch)) if arch else recognize(state)
    message = caught.value.message.rpartition(" hold ")[2]
    assert all(word in message for word in words)
    assert {kind for kind in KINDS if kind in message} == {k for k in KINDS if k in " ".join(words)}
    assert advice in caught.value.remedy
    assert "mlp:" not in caught.value.remedy
    assert caught.value.exit_code == 2


def test_advice_for_a_convnet_is_true_and_its_range_of_sides_exact() -> None:
    with pytest.raises(CheckpointError) as caught:
        recognize(CNN)
    arch = Architecture.parse(caught.value.remedy.partition("--arch ")[2].partition(". ")[0])
    assert match_architecture(CNN, arch)["convolutions.1.bias"] == "conv2.bias"
    assert "Sides from 25 to 28" in caught.value.remedy
    for side in range(20, 35):
        other = Architecture.parse(f"convnet:1x{side}x{side}-8-16-10,bias=all").build()
        assert (other.head.in_features == 16 * 49) == (25 <= side <= 28)


@pytest.mark.parametrize(
    "change",
    [
        {"conv2": nn.Conv2d(4, 16, 3)},
        {"fc": nn.Linear(16 * 48, 10)},
        {"fc": nn.Linear(16 * 49 + 1, 10)},
        {"extra": nn.Conv2d(16, 16, 3, bias=False)},
    ],
    ids=["channels do not chain", "no square", "no whole number of pixels", "bias without a rule"],
)
def test_no_convnet_is_advised_that_would_not_fit(change: dict[str, nn.Module]) -> None:
    with pytest.raises((CheckpointError, ArchitectureError)) as caught:
        recognize(CNN | state_of(**change))
    assert "convnet:" not in str(caught.value)


def test_advice_for_an_mlp_under_a_wrong_architecture_is_true() -> None:
    state = state_of(fc1=nn.Linear(5, 7), fc2=nn.Linear(7, 2))
    for wrong in ("mlp:5-7-2", "mlp:5-6-2", "convnet:1x8x8-4-2", "polynomial:5-7-1"):
        with pytest.raises(ArchitectureError, match="they fit mlp:5-7-2,bias=all") as caught:
            match_architecture(state, Architecture.parse(wrong))
        assert caught.value.remedy == "Pass --arch mlp:5-7-2,bias=all or omit --arch."
    assert match_architecture(state, Architecture.parse("mlp:5-7-2,bias=all"))


@pytest.mark.parametrize("name", ["tensor", "float_a.weight", "floral.weight"])
def test_adapters_are_known_by_whole_words(name: str) -> None:
    refuse_by_name({name: torch.ones(2, 2)})


@pytest.mark.parametrize(
    "name",
    ["lora_A", "base_model.model.fc.lora_B.default.weight", "fc_lora_down.weight", "a.ia3_l"],
)
def test_adapters_are_refused_by_name(name: str) -> None:
    with pytest.raises(CheckpointError, match="adapter"):
        refuse_by_name({name: torch.ones(2, 2)})


@pytest.mark.parametrize("sizes", ["mlp:5-3-1", "convnet:1x8x8-4-1"])
def test_smooth_activations_are_named_as_people_name_them(sizes: str) -> None:
    for spelling, name in (
        ("GELU", "gelu"),
        ("swish", "silu"),
        ("LeakyReLU", "leaky_relu"),
        ("Tanh", "tanh"),
        ("logistic", "sigmoid"),
        ("elu", "elu"),
    ):
        assert (
            str(Architecture.parse(f"{sizes},activation={spelling}"))
            == f"{sizes},activation={name}"
        )


def test_other_activations_are_known_and_refused_with_the_reason() -> None:
    for name in ["softplus", "Mish", "hard_swish", "relu6"]:
        for sizes in ["mlp:5-3-1", "convnet:1x8x8-4-1"]:
            with pytest.raises(ArchitectureError) as caught:
                Architecture.parse(f"{sizes},activation={name}")
            assert (
                "option 'activation' must name a supported activation function"
                in caught.value.message
            )
            assert "Pass the network itself" in caught.value.remedy
            assert "Did you mean" not in str(caught.value)
