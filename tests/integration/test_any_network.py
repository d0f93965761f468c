"""Networks as people write them: what they are is measured, and what cannot be attacked is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.neural_network import MLPClassifier, MLPRegressor
from torch import Tensor, nn
from torch.nn import functional as F

import residuum as rs
from residuum.attacks import estimate
from residuum.attacks.stationarity import plain
from residuum.attacks.stationarity.objectives import BinaryKKT, MulticlassKKT, WeightDecay
from residuum.attacks.stationarity.problem import Problem
from residuum.auditing.certificates import kkt_certificate
from residuum.cli.main import main
from residuum.engine.generic import GRAPH_FACTOR
from residuum.errors import ArchitectureError, CheckpointError, InputError
from residuum.io.checkpoints import as_network
from residuum.io.modules import wrap_module
from residuum.io.trusted_code import build_network, load_with_code
from residuum.networks import ConvNet, Kinks, SigmoidReLU, Softplus, dense_chain, with_surrogate
from residuum.networks.probing import probe


class Net(nn.Module):
    """The first network everybody writes."""

    def __init__(self, activation: Any = F.relu, outputs: int = 3) -> None:
        super().__init__()
        self.fc1, self.fc2, self.out = nn.Linear(16, 12), nn.Linear(12, 8), nn.Linear(8, outputs)
        self.drop, self.activation = nn.Dropout(), activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.fc1(x.view(len(x), -1)))
        return self.out(self.drop(self.activation(self.fc2(x))))


class Block(nn.Module):
    """Of a small ResNet: batch norm, in-place ReLU, a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.conv(x)) + x)


class ViT(nn.Module):
    """Patches, one layer of attention, layer norm, GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 8, 2, stride=2)
        self.layer = nn.TransformerEncoderLayer(
            8, 2, 16, activation="gelu", batch_first=True, norm_first=True
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.patch(x).flatten(2).transpose(1, 2)).mean(1))


def resnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(2))
    return nn.Sequential(
        stem, Block(4), Block(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


def moved(model: nn.Module) -> nn.Module:
    """Running statistics as after training."""
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(3):
        model(torch.randn(20, 1, 4, 4, generator=generator))
    return model.eval()


NETWORKS = {"resnet": lambda: moved(resnet()), "vit": ViT, "net": lambda: Net(F.mish)}
SHAPE = rs.Knowledge(shape=(1, 4, 4))


# What a forward computes


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (F.relu, ""),
        (torch.tanh, ",activation=tanh"),
        (F.gelu, ",activation=gelu"),
        (F.leaky_relu, ",activation=leaky_relu"),
        (lambda x: x.clamp(min=0), ""),
    ],
)
def test_a_class_that_computes_an_mlp_is_that_mlp(activation: Any, name: str) -> None:
    torch.manual_seed(0)
    model = Net(activation)
    checkpoint = rs.checkpoint_from_module(model, fallback_shape=(1, 4, 4))
    assert checkpoint.arch == "mlp:16-12-8-3,bias=all" + name
    assert checkpoint.live is None
    assert checkpoint.source_names["layers.1.weight"] == "fc2.weight"
    x = torch.randn(5, 16)
    torch.testing.assert_close(checkpoint.copy_module()(x), model.eval()(x))


@pytest.mark.parametrize(
    "activation", [F.mish, lambda x: F.gelu(x, approximate="tanh"), lambda x: F.leaky_relu(x, 0.2)]
)
def test_a_class_that_computes_another_function_is_kept(activation: Any) -> None:
    torch.manual_seed(0)
    assert rs.checkpoint_from_module(Net(activation)).arch == "module:16-3,class=Net"


def test_strides_are_distinguished_from_pooling_by_what_they_compute() -> None:
    """The shapes are the same."""
    torch.manual_seed(0)
    like = ConvNet((1, 8, 8), (3, 4), 2, "all")

    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c1, self.c2 = copy.deepcopy(like.convolutions)
            self.fc = copy.deepcopy(like.head)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(F.relu(self.c2(F.relu(self.c1(x)))).flatten(1))

    class Pooled(Strided):
        def __init__(self) -> None:
            super().__init__()
            self.c1.stride = self.c2.stride = (1, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = F.max_pool2d(F.relu(self.c1(x)), 2)
            return self.fc(F.max_pool2d(F.relu(self.c2(x)), 2).flatten(1))

    shape = {"fallback_shape": (1, 8, 8)}
    assert rs.checkpoint_from_module(Strided(), **shape).arch == "convnet:1x8x8-3-4-2,bias=all"
    assert rs.checkpoint_from_module(Pooled(), **shape).module is not None


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_what_is_wrapped_around_a_network_is_taken_off(wrap: Any) -> None:
    assert rs.checkpoint_from_module(wrap(Net())).arch == "mlp:16-12-8-3,bias=all"


@pytest.mark.parametrize("activation", ["relu", "tanh", "logistic", "identity"])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_estimators_of_scikit_learn_are_networks(activation: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60, 5, generator=generator, dtype=torch.float64).numpy()
    settings = {"hidden_layer_sizes": (7, 6), "activation": activation, "max_iter": 30}
    y = (x @ [1.0, -1, 1, -1, 0.5] * 4).round()
    for estimator, task in (
        (MLPClassifier(**settings, random_state=0).fit(x, y > 0), "binary"),
        (MLPClassifier(**settings, random_state=0).fit(x, y % 3), "multiclass"),
        (MLPRegressor(**settings, random_state=0).fit(x, y), "regression"),
    ):
        checkpoint = as_network(estimator)
        outputs = checkpoint.copy_module()(torch.from_numpy(x)).detach()
        assert checkpoint.task == task
        if task == "binary":
            expected = torch.special.logit(torch.from_numpy(estimator.predict_proba(x)[:, 1]))
            torch.testing.assert_close(outputs[:, 0], expected, rtol=1e-6, atol=1e-8)
        elif task == "multiclass":
            expected = torch.from_numpy(estimator.predict_proba(x))
            torch.testing.assert_close(outputs.softmax(1), expected, rtol=1e-6, atol=1e-8)
        else:
            torch.testing.assert_close(outputs[:, 0], torch.from_numpy(estimator.predict(x)))


# What cannot be attacked


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).mean(1))


class Odd(Net):
    """One thing wrong at a time."""

    def __init__(self, wrong: str) -> None:
        super().__init__(F.mish)
        self.wrong = wrong
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        if self.wrong == "state":
            self.calls += 1
        if self.wrong == "whole":
            x = x.round().long().to(self.fc1.weight.dtype)
        if self.wrong == "beside":
            x = x - x.mean(0)
        if self.wrong == "infinite":
            x = x / 0
        output = super().forward(F.dropout(x) if self.wrong == "random" else x)
        return {"logits": output} if self.wrong == "dict" else output


@pytest.mark.parametrize(
    ("wrong", "message", "remedy"),
    [
        ("state", "changes 'calls'", "if self.training"),
        ("random", "draws random numbers", "training=self.training"),
        ("whole", "must be differentiable with respect to the sample", "rounding"),
        ("beside", "change with the other samples of the batch", "track_running_stats"),
        ("infinite", "must be finite", "diverge"),
        ("dict", "returned dict", "logits"),
    ],
)
def test_what_is_wrong_is_refused_with_the_reason(wrong: str, message: str, remedy: str) -> None:
    assert rs.attack(Odd(""), SHAPE, SHORT).x.shape[1:] == (1, 4, 4)  # the same without it
    with pytest.raises(ArchitectureError) as caught:
        rs.attack(Odd(wrong), SHAPE, SHORT)
    assert message in caught.value.message
    assert remedy in caught.value.remedy


SHORT = rs.attacks.Auto(steps=2, restarts=1, candidates=4)


def test_tokens_are_whole_numbers_and_the_part_behind_the_embedding_is_not() -> None:
    model = Tokens()
    with pytest.raises(ArchitectureError, match="takes whole numbers, such as tokens") as caught:
        rs.attack(model, rs.Knowledge(shape=(6,)), SHORT)
    assert "after the embedding" in caught.value.remedy

    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = model.head

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.mean(1))

    reconstruction = rs.attack(Behind(), rs.Knowledge(shape=(6, 4)), SHORT)
    assert torch.isfinite(reconstruction.loss).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_network_hides_its_kinks_and_its_weights_do() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.Mish(), nn.Linear(3, 2)))
    with pytest.raises(ArchitectureError, match="TorchScript hides") as caught:
        rs.attack(scripted, rs.Knowledge(shape=(4,)), SHORT)
    assert "scripted.state_dict()" in caught.value.remedy
    assert as_network(scripted.state_dict()).arch == "mlp:4-3-2,bias=all"


def test_one_output_may_come_without_a_dimension() -> None:
    class Flat(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).squeeze(-1)

    torch.manual_seed(0)
    model = Flat(F.mish, 1)
    checkpoint = rs.checkpoint_from_module(model, input_shape=(16,))
    assert checkpoint.arch == "module:16-1,class=Flat"
    x = torch.randn(3, 16)
    assert torch.equal(checkpoint.copy_module()(x)[:, 0], model.eval()(x))


def test_what_a_reader_must_know_is_noted() -> None:
    probed = probe(moved(resnet()), (1, 4, 4))
    assert any("max-pooling" in note and "ReLU" in note for note in probed.notes)
    assert any("BatchNorm2d uses running statistics" in note for note in probed.notes)
    assert all(len(note) <= 200 for note in probed.notes)
    soft = nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)).eval()
    assert any("outputs are probabilities" in note for note in probe(soft, (4,)).notes)
    assert not probe(ViT().eval(), (1, 4, 4)).notes[1:]  # dropout alone
    soft[0].requires_grad_(False)
    assert not any(
        "frozen" in note for note in probe(soft, (4,)).notes
    )  # all of it: no longer trained
    soft[0].bias.requires_grad_(True)
    assert any("1 of 2 parameters are frozen" in note for note in probe(soft, (4,)).notes)


# The generic path


def problem(model: nn.Module, objective: Any, **options: Any) -> Problem:
    outputs = model(torch.zeros(1, 1, 4, 4)).shape[1]
    labels = objective.labels(5, outputs, SHAPE)
    return Problem(model, objective, SHAPE, labels, layers="all", **options)


def points(count: int, outputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 5, 1, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.rand(count, 5, outputs, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("objective", [MulticlassKKT(), WeightDecay(0.7, "squared")])
def test_chunks_and_runs_side_by_side_change_nothing(name: str, objective: Any) -> None:
    torch.manual_seed(0)
    problem_unchunked = problem(NETWORKS[name]().eval(), objective)
    x, lam = points(3, 3)
    if isinstance(objective, WeightDecay):
        problem_unchunked.labels = problem_unchunked.labels[:, None].expand(-1, 3)[:, 0]
    expected = problem_unchunked.evaluate(x, lam, 5.0)
    equation = problem_unchunked.generic
    assert equation.saved > 0
    for workspace, side_by_side in ((2 * GRAPH_FACTOR * equation.saved, False), (2**40, True)):
        equation.workspace, equation.side_by_side = workspace, side_by_side
        chunked = problem_unchunked.evaluate(x, lam, 5.0)
        assert equation.side_by_side == side_by_side  # vmap was not given up
        for field in ("loss", "layers", "grad_x", "grad_lam"):
            torch.testing.assert_close(
                getattr(chunked, field), getattr(expected, field), rtol=1e-10, atol=1e-13
            )


def test_a_forward_that_vmap_cannot_transform_runs_one_run_after_the_other() -> None:
    class Branch(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2.0 if float(x.detach().mean()) > 9 else 1.0)

    torch.manual_seed(0)
    complete_problem = problem(Branch(F.mish).eval(), MulticlassKKT())
    x, lam = points(2, 3)
    expected = complete_problem.evaluate(x, lam)
    complete_problem.generic.side_by_side = True
    evaluation = complete_problem.evaluate(x, lam)
    assert not complete_problem.generic.side_by_side
    assert torch.equal(evaluation.grad_x, expected.grad_x)


def test_an_all_relu_convnet_is_attacked_as_its_string() -> None:
    torch.manual_seed(0)
    model = ConvNet((1, 4, 4), (3, 4), 1)
    config = rs.attacks.Auto(steps=100, restarts=1, candidates=5, dtype="float64")
    wrapped_result = rs.attack(wrap_module(model, (1, 4, 4)), SHAPE, config)
    other = rs.attack(model, SHAPE, config)
    assert rs.checkpoint_from_module(model).arch == "convnet:1x4x4-3-4-1"
    torch.testing.assert_close(wrapped_result.loss, other.loss, rtol=1e-8, atol=0)
    torch.testing.assert_close(wrapped_result.x, other.x, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", ["relu", "gelu", "silu", "tanh", "sigmoid", "elu"])
def test_the_engine_equals_the_generic_path_for_every_activation(name: str) -> None:
    torch.manual_seed(0)
    model = rs.Architecture.parse(f"mlp:16-7-5-1,bias=all,activation={name}").build()
    assert dense_chain(model) is not None
    modules = [module for layer in model.linears for module in (layer, model.activation)][:-1]
    wrapped = wrap_module(nn.Sequential(*modules), (16,))
    assert dense_chain(wrapped.copy_module()) is None
    config = rs.attacks.Auto(steps=100, restarts=1, candidates=5, layers="all", dtype="float64")
    wrapped_result = rs.attack(wrapped, None, config)
    other = rs.attack(model, None, config)
    torch.testing.assert_close(wrapped_result.loss, other.loss, rtol=1e-8, atol=0)
    torch.testing.assert_close(wrapped_result.x, other.x, rtol=0, atol=1e-8)


def test_a_network_with_attention_is_attacked_in_one_file_as_it_is() -> None:
    torch.manual_seed(0)
    model, steps = ViT().eval(), {"candidates": 4, "steps": 25, "layers": "all"}
    expected = plain.attack(model, MulticlassKKT(), SHAPE, **steps)
    reconstruction = rs.attack(model, SHAPE, rs.attacks.Auto(restarts=1, dtype="float64", **steps))
    torch.testing.assert_close(reconstruction.loss, expected.loss, rtol=1e-10, atol=0)
    torch.testing.assert_close(reconstruction.x, expected.x, rtol=0, atol=1e-9)


# Kinks


@pytest.mark.parametrize(
    ("true", "kind"),
    [
        (nn.ReLU(), "ReLU"),
        (nn.ReLU(True), "ReLU"),
        (nn.LeakyReLU(0.3), "LeakyReLU"),
        (nn.PReLU(3), "PReLU"),
        (nn.RReLU().eval(), "RReLU"),
        (nn.ReLU6(), "Hardtanh"),
        (nn.Hardtanh(-0.5, 0.7), "Hardtanh"),
        (torch.relu, "ReLU"),
        (F.relu6, "ReLU6"),
        (lambda x: x.clamp(min=0), "ReLU"),
        (lambda x: torch.clamp(x, 0), "ReLU"),
        (lambda x: x.clamp_min(0), "ReLU"),
        (lambda x: F.relu(x, True), "ReLU"),
        (nn.MaxPool2d(2), "max-pooling"),
        (nn.MaxPool2d(3, 2, 1), "max-pooling"),
        (nn.MaxPool2d(2, 3, ceil_mode=True), "max-pooling"),
        (nn.MaxPool2d(2, 4, ceil_mode=True), "max-pooling"),
        (nn.MaxPool2d((3, 1)), "max-pooling"),
        (nn.AdaptiveMaxPool2d((2, 4)), "max-pooling"),
        (nn.AdaptiveMaxPool2d(1), "max-pooling"),
        (lambda x: F.max_pool1d(x.flatten(2), 3, 2), "max-pooling"),
    ],
)
def test_a_surrogate_has_the_values_of_its_kink_and_in_the_limit_its_slopes(
    true: Any, kind: str
) -> None:
    x = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def run(sharpness: float | None) -> tuple[Tensor, Tensor]:
        z = x.clone().requires_grad_()
        if sharpness is None:
            out = true(z * 1.0)
        else:
            with Kinks(SigmoidReLU(sharpness)) as kinks:
                out = true(z * 1.0)
            assert kinks.seen == {kind: 1}
            assert not kinks.unsmoothed
        weight = torch.arange(out.numel(), dtype=out.dtype).view_as(out)
        return out.detach(), torch.autograd.grad((weight * out).sum(), z)[0]

    if isinstance(true, nn.Module):
        true.double()
    (out, slope), (sharp, limit), (_, soft) = run(None), run(1e8), run(3.0)
    torch.testing.assert_close(sharp, out)
    torch.testing.assert_close(limit, slope)
    assert not torch.allclose(soft, slope)


@pytest.mark.parametrize("true", [nn.AdaptiveMaxPool2d(3), torch.abs, lambda x: x.amax((2, 3))])
def test_kinks_without_a_surrogate_stay_and_are_named(true: Any) -> None:
    x = torch.randn(2, 3, 4, 8)
    with Kinks(SigmoidReLU()) as kinks:
        assert torch.equal(true(x), true(x))
    assert sum(kinks.unsmoothed.values()) == 2
    assert not kinks.seen
    assert torch.equal(with_surrogate(nn.Identity(), SigmoidReLU())(x), x)


def test_a_network_of_functions_gives_its_sample_back_at_an_exact_point() -> None:
    """One neuron in use: theta = lam y grad Phi(x) has one solution up to scale."""
    torch.manual_seed(0)
    x = torch.rand(1, 1, 4, 4) + 0.1

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter((x / x.norm()).flatten()[None])
            self.v = nn.Parameter(torch.ones(1, 1))

        def forward(self, z: Tensor) -> Tensor:
            return F.relu(z.flatten(1) @ self.w.T) @ self.v.T

    config = rs.attacks.Auto(
        steps=600, restarts=1, candidates=1, lr_x=0.03, layers="all", priors=()
    )
    knowledge = SHAPE.replace(label_balance=(0.0, 1.0))
    reconstruction = rs.attack(wrap_module(One(), (1, 4, 4)), knowledge, config)
    assert float(F.cosine_similarity(reconstruction.x.flatten(1), x.double().flatten(1))) > 0.999
    assert BinaryKKT.name == reconstruction.attack


# Files of them


CODE = """
from torch import nn

def build():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(12, 2),
    )

def wrong():
    raise ValueError("no such size")

def nothing():
    return 3

network = build()
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Code, weights and samples in the working folder."""
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    name = f"code_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(CODE)
    (tmp_path / "name").write_text(name)
    model = build_network(f"{name}:build", trusted=True)
    torch.save(moved(model).state_dict(), tmp_path / "w.pt")
    torch.save({"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}}, "ddp.pt")
    x = torch.rand(120, 1, 4, 4)
    for file, rows in (("data", slice(0, 10)), ("rest", slice(10, None))):
        rs.Dataset(x[rows], torch.arange(120)[rows] % 2).to_npz(tmp_path / f"{file}.npz")
    return tmp_path


def test_a_file_of_weights_with_the_code_of_its_network_is_audited_and_repeated(
    files: Path,
) -> None:
    code = f"{(files / 'name').read_text()}:build"
    options = [
        "--data",
        "data.npz",
        "--holdout",
        "rest.npz",
        "--steps",
        "3",
        "--effort",
        "quick",
        "--quiet",
        "--subsets",
        "200",
        "--exit-zero",
    ]
    arguments = ["audit", "w.pt", "--model", code, *options]
    assert main([*arguments, "--out", "a"]) == 4
    assert not Path("a").exists()
    assert main([*arguments, "--trust-code", "--out", "a"]) == 0
    result = json.loads(Path("a/result.json").read_text())
    assert result["network"]["arch"] == "module:1x4x4-2,class=Sequential"
    assert any("BatchNorm2d" in line for line in result["assumptions"])
    command = ["audit", "--config", "a/config.toml", "--out", "b", "--quiet", "--exit-zero"]
    assert main(command) == 4
    assert main([*command, "--trust-code"]) == 0
    assert json.loads(Path("b/result.json").read_text())["scores"] == result["scores"]
    grant = ["--shape", "1,4,4", "--init", "w.pt"]
    run = [
        "attack",
        "multiclass-kkt",
        "ddp.pt",
        "--model",
        code,
        "--trust-code",
        "--steps",
        "2",
        *grant,
    ]
    assert main([*run, "--out", "c", "--quiet"]) == 0


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("wrong", "it raised ValueError: no such size"),
        ("nothing", "it returned a int"),
        ("missing", "it raised AttributeError"),
        ("a b", "as package.module:function"),
    ],
)
def test_code_that_makes_no_network_says_so(files: Path, factory: str, words: str) -> None:
    name = (files / "name").read_text()
    with pytest.raises(InputError) as caught:
        load_with_code("w.pt", f"{name}:{factory}", (1, 4, 4), trusted=True)
    assert words in caught.value.message
    assert caught.value.remedy


def test_weights_of_another_network_are_refused(files: Path) -> None:
    name = (files / "name").read_text()
    state = torch.load("w.pt")
    checkpoint = load_with_code("w.pt", f"{name}:network", (1, 4, 4), trusted=True)
    assert torch.equal(checkpoint.theta["0.weight"], state["0.weight"])
    assert checkpoint.module is not None
    assert torch.equal(checkpoint.module[1].running_mean, state["1.running_mean"])  # type: ignore[index]
    for change, words in (
        ({"0.weight": None}, "these weights lack 0.weight"),
        ({"9.weight": torch.ones(1)}, "these weights also hold 9.weight"),
        ({"0.bias": torch.ones(9)}, "another shape for 0.bias"),
    ):
        torch.save({k: v for k, v in {**state, **change}.items() if v is not None}, "x.pt")
        with pytest.raises(CheckpointError, match=words):
            load_with_code("x.pt", f"{name}:build", (1, 4, 4), trusted=True)


class Sequence(nn.Module):
    """The last state of a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.flatten(1, 2))[0][:, -1])


def test_recurrent_layers_are_attacked() -> None:
    torch.manual_seed(0)
    reconstruction = rs.attack(
        Sequence(), SHAPE, rs.attacks.Auto(steps=25, restarts=1, candidates=4)
    )
    assert float(reconstruction.loss[0, -1]) < float(reconstruction.loss[0, 0])


def test_a_forward_of_one_type_is_refused_where_its_remedy_is_not() -> None:
    class Fixed(Net):
        table = torch.eye(16)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(1) @ self.table)

    class Kept(Net):
        def __init__(self) -> None:
            super().__init__(F.mish)
            self.register_buffer("table", torch.eye(16))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(1) @ self.table)

    with pytest.raises(ArchitectureError, match="creates tensors of a fixed type") as caught:
        rs.attack(Fixed(F.mish), SHAPE, SHORT)
    assert "register them as buffers" in caught.value.remedy
    assert torch.isfinite(rs.attack(Kept(), SHAPE, SHORT).loss).all()


def test_memory_of_the_passes_is_part_of_an_estimate() -> None:
    torch.manual_seed(0)
    checkpoint = rs.checkpoint_from_module(moved(resnet()), input_shape=(1, 4, 4))
    few, many = (
        estimate(checkpoint, SHAPE, rs.attacks.Auto(restarts=1, candidates=m), measured=0.01)
        for m in (10, 30)
    )
    assert many.memory["passes"] == 3 * few.memory["passes"] > 0


def test_gradients_of_all_samples_are_not_held_for_a_certificate_of_a_large_network() -> None:
    torch.manual_seed(0)
    train = rs.Dataset(torch.rand(20, 1, 4, 4), torch.arange(20) % 3)
    net = rs.checkpoint_from_module(moved(resnet()), input_shape=(1, 4, 4))
    parameters = sum(t.numel() for t in net.theta.values())
    assert kkt_certificate(net, train, (), 1.0)[0] is not None
    none, reason = kkt_certificate(net, train, (), 1.0, max_bytes=8 * 20 * parameters - 1)
    assert none is None
    assert "the gradients of 20 samples take" in reason
    chain = rs.checkpoint_from_module(Net())
    assert kkt_certificate(chain, train, (), 1.0)[0] is not None  # in closed form


def test_images_may_be_given_to_a_network_that_takes_them_flat() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    model(torch.randn(9, 16))
    reconstruction = rs.attack(model, SHAPE, SHORT)
    assert reconstruction.x.shape[1:] == (1, 4, 4)
    checkpoint = rs.checkpoint_from_module(model, fallback_shape=(1, 4, 4))
    x = torch.randn(3, 1, 4, 4)
    assert torch.equal(checkpoint.copy_module()(x), model.eval()(x.flatten(1)))
    with pytest.raises(ArchitectureError, match=r"samples of shape \(1, 4, 5\)"):
        rs.attack(model, rs.Knowledge(shape=(1, 4, 5)), SHORT)


def test_a_forward_that_fails_where_the_attack_runs_is_no_internal_error() -> None:
    class Elsewhere(Net):
        broken = False

        def forward(self, x: Tensor) -> Tensor:
            if self.broken:
                raise RuntimeError("Expected all tensors to be on the same device")
            return super().forward(x)

    torch.manual_seed(0)
    complete_problem = problem(Elsewhere(F.mish).eval(), MulticlassKKT())
    complete_problem.points[0].broken = True  # type: ignore[assignment]
    with pytest.raises(
        ArchitectureError,
        match=r"must run on the device 'cpu' with numbers of the type float64; its forward",
    ):
        complete_problem.evaluate(*points(1, 3))


@pytest.mark.filterwarnings("ignore")
def test_kinks_that_cannot_be_seen_are_said_to_stay() -> None:
    torch.manual_seed(0)
    plain_net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    graph = torch.export.export(plain_net, (torch.randn(2, 1, 4, 4),), dynamic_shapes=({0: batch},))
    notes = probe(graph.module(), (1, 4, 4)).notes
    assert any(note == "attacks do not smooth these kinks: relu" for note in notes)
    assert not any("do not smooth" in note for note in probe(plain_net, (1, 4, 4)).notes)

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.jit.script(plain_net)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    with pytest.raises(ArchitectureError, match="TorchScript hides"):
        rs.attack(Partly(), SHAPE, SHORT)


def test_whole_numbers_are_no_activations() -> None:
    lengths = torch.tensor([3, -1])
    with Kinks(Softplus()) as kinks:
        assert lengths.clamp(min=0).tolist() == [3, 0]
    assert not kinks.seen
    assert not kinks.unsmoothed


class Strict(nn.Module):
    """A network that takes samples of one shape alone and raises its own error for others, as Keras does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 10), nn.Linear(10, 1)
        self.factor = nn.Parameter(torch.ones(1))

    def __call__(
        self, x: Tensor
    ) -> Tensor:  # Keras looks at the shape before forward and its hooks
        if x.ndim != 3:
            raise ValueError(f"Expected shape (None, 8, 8), got {tuple(x.shape)}")
        return super().__call__(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sin(self.factor * self.first(x.flatten(1))))


def test_a_network_is_measured_with_samples_of_its_own_shape() -> None:
    torch.manual_seed(0)
    checkpoint = rs.checkpoint_from_module(Strict(), fallback_shape=(8, 8))
    assert checkpoint.homogeneity_order is None


class Single(nn.Module):
    """A network that computes in float32 whatever it is given, as Keras does.

    ``leak``: how much of the mean over the batch is added to every output.
    """

    def __init__(self, leak: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 10), nn.Linear(10, 1)
        self.leak = leak

    def forward(self, x: Tensor) -> Tensor:
        weights = [t.float() for t in self.parameters()]
        hidden = torch.sin(nn.functional.linear(x.float(), *weights[:2]))
        outputs = nn.functional.linear(hidden, *weights[2:])
        noise = 1e-6 * torch.sin(torch.tensor(1e3 * len(x)))  # rounding that depends on the batch
        return outputs * (1 + noise) + self.leak * outputs.mean(0)


def test_rounding_of_float32_is_no_dependence_between_samples() -> None:
    torch.manual_seed(0)
    assert probe(Single(), (64,)).outputs == 1
    with pytest.raises(ArchitectureError, match="change with the other samples of the batch"):
        probe(Single(0.01), (64,))
