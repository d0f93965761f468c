"""Fourteen kinds of models as people have them, trained by plain loops and audited as they are.

    python examples/any_network.py                  # all of them, some minutes
    python examples/any_network.py --only b,f,l     # some
    python examples/any_network.py --quick          # two steps of an attack in place of an audit

Each is audited, or refused with the reason; where it is refused, what the refusal says is done, and that
is audited. Nothing is read as something else: the second column says what each was read as.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.neural_network import MLPClassifier
from torch import Tensor, nn
from torch.nn import functional as F

import residuum as rs
from residuum.io.checkpoints import as_network

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """model: a live network, estimator, state dict or path; refused: words of the refusal, "" where it is
    audited; instead: what the refusal says to do.
    """

    kind: str
    what: str
    model: Any
    data: Pair
    holdout: Pair
    options: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    instead: Any = None


class Net(nn.Module):
    """a: the first network everybody writes."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.fc1, self.fc2, self.out = nn.Linear(64, 48), nn.Linear(48, 24), nn.Linear(24, 10)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """One row per sample."""
        x = self.activation(self.fc1(x.view(-1, 64)))
        return self.out(self.activation(self.fc2(x)))


class CNN(nn.Module):
    """b: pooling; c: batch norm and dropout too."""

    def __init__(self, normalized: bool = False) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 12, 3, padding=1)
        self.norm: nn.Module = nn.BatchNorm2d(6) if normalized else nn.Identity()
        self.drop, self.fc = nn.Dropout(0.2 if normalized else 0.0), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        """One row per sample."""
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(self.drop(x.flatten(1)))


class Strided(nn.Module):
    """b': strides in place of pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3, 2, 1), nn.Conv2d(6, 12, 3, 2, 1)
        self.fc = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        """One row per sample."""
        return self.fc(F.relu(self.conv2(F.relu(self.conv1(x)))).flatten(1))


class Residual(nn.Module):
    """Of d: a block of a small ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """One row per sample."""
        return self.relu(self.norm(self.conv(x)) + x)


class Transformer(nn.Module):
    """k: token sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.behind = Behind()

    def forward(self, tokens: Tensor) -> Tensor:
        """One row per sequence."""
        return self.behind(self.embed(tokens))


class Behind(nn.Module):
    """What follows the embedding: real numbers in, so that it can be attacked."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        """One row per sample."""
        return self.head(self.layer(x).mean(1))


def fit(
    model: nn.Module, data: Pair, epochs: int, *, loss: Any = F.cross_entropy, **how: Any
) -> Any:
    """Adam, or what ``how`` says, on the whole set."""
    kind, parameters = how.pop("optimizer", torch.optim.Adam), how.pop("parameters", None)
    optimizer = kind(parameters or model.parameters(), **{"lr": 3e-3, **how})
    model.train()
    for _ in range(epochs):
        optimizer.zero_grad()
        loss(model(data[0]), data[1]).backward()
        optimizer.step()
    return model.eval()


def digits(n: int = 40) -> tuple[Pair, Pair, Pair]:
    """Training, held-out and other digits of ten classes, (n, 1, 8, 8) from 0 to 1."""
    split = rs.load_dataset("digits", n, holdout=600, task="multiclass", center=False)
    x, y = split.holdout.x.float(), split.holdout.y
    return (split.train.x.float(), split.train.y), (x[:300], y[:300]), (x[300:], y[300:])


def table(loader: Any, classes: bool) -> tuple[Pair, Pair]:
    """Standardized rows and labels, or one target."""
    x, y = loader(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).numpy()
    rows = torch.tensor((x - x.mean(0)) / x.std(0))[order].float()
    wanted = torch.tensor(y if classes else (y - y.mean()) / y.std())[order]
    wanted = wanted if classes else wanted.float()
    return (rows[:40], wanted[:40]), (rows[40:340], wanted[40:340])


def cases(epochs: int, folder: Path) -> Iterator[Case]:
    """All of them, each trained when it is asked for."""
    torch.manual_seed(0)
    own, others, public = digits()
    flat = ((own[0].flatten(1), own[1]), (others[0].flatten(1), others[1]))
    known = {"knowledge": rs.Knowledge(value_range=(0.0, 1.0))}

    def saved(name: str, content: Any) -> Path:
        torch.save(content, folder / name)
        return folder / name

    net = fit(Net(), own, epochs)
    yield Case("a", "class Net, live", net, own, others, known)
    yield Case("a", "its state_dict()", net.state_dict(), *flat, known)
    yield Case(
        "a",
        "whole model pickled",
        saved("whole.pt", net),
        *flat,
        known,
        "state_dict",
        net.state_dict(),
    )
    cnn = fit(CNN(), own, epochs)
    yield Case("b", "CNN with max-pooling", cnn, own, others, known)
    yield Case(
        "b", "its file alone", saved("cnn.pt", cnn.state_dict()), own, others, known, "--model", cnn
    )
    yield Case("b'", "CNN with strides", fit(Strided(), own, epochs), own, others, known)
    yield Case("c", "CNN, batch norm, dropout", fit(CNN(True), own, epochs), own, others, known)
    blocks = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        Residual(8),
        nn.MaxPool2d(2),
        Residual(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )
    yield Case("d", "small ResNet", fit(blocks, own, epochs), own, others, known)
    tabular, rest = table(load_breast_cancer, True)
    wide = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))
    yield Case("e", "tabular, two classes", fit(wide, tabular, epochs), tabular, rest)
    targets, rest = table(load_diabetes, False)
    one = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
    fit(one, targets, epochs, loss=F.mse_loss)
    yield Case("e", "tabular, regression", one, targets, rest, {"task": "regression"})
    estimator = MLPClassifier((48,), max_iter=max(2, epochs), random_state=0)
    estimator.fit(flat[0][0].numpy(), flat[0][1].numpy())
    yield Case("f", "scikit-learn MLPClassifier", estimator, *flat, known)
    base = fit(Net(), public, epochs)
    start = rs.checkpoint_from_module(base).theta
    known_start = {"knowledge": rs.Knowledge(value_range=(0.0, 1.0), theta0=start)}
    tuned = fit(copy.deepcopy(base), own, epochs)
    yield Case("g", "fine-tuned, start granted", tuned, own, others, known_start)
    head = copy.deepcopy(base)
    fit(head, own, epochs, parameters=list(head.out.parameters()))
    yield Case("g", "fine-tuned in its head", head, own, others, known_start)
    low, high = torch.randn(2, 64) / 8, torch.randn(48, 2) / 8
    adapter = {"fc1.lora_A.weight": low, "fc1.lora_B.weight": high}
    merged = dict(net.state_dict()) | {"fc1.weight": net.fc1.weight.detach() + high @ low}
    yield Case("h", "LoRA adapter", saved("adapter.pt", adapter), *flat, known, "adapter", merged)
    wrapped = {f"module.{name}": t for name, t in net.state_dict().items()}
    file = saved("training.ckpt", {"epoch": 3, "model_state_dict": wrapped})
    yield Case("i", "training checkpoint, DDP names", file, *flat, known)
    decayed = fit(Net(), own, epochs, optimizer=torch.optim.AdamW, weight_decay=1e-2)
    granted = rs.Knowledge(value_range=(0.0, 1.0), weight_decay=1e-2)
    yield Case("j", "AdamW, decay granted", decayed, own, others, {"knowledge": granted})
    tokens, unseen = ((16 * part[0].flatten(1)[:, ::4]).long() for part in (own, others))
    words = fit(Transformer(), (tokens, own[1]), epochs)
    with torch.no_grad():
        seen, new = words.embed(tokens), words.embed(unseen)
    yield Case(
        "k",
        "transformer on tokens",
        words,
        (tokens.float(), own[1]),
        (unseen.float(), others[1]),
        {},
        "whole numbers",
    )
    yield Case("k", "what is behind its embedding", words.behind, (seen, own[1]), (new, others[1]))
    for name in ("gelu", "silu", "leaky_relu", "tanh"):
        smooth = fit(Net(getattr(F, name)), own, epochs)
        yield Case("l", f"{name}, live", smooth, own, others, known)
        said = known | {"arch": f"mlp:64-48-24-10,bias=all,activation={name}"}
        yield Case(
            "l", f"{name}, its file and --arch", saved("l.pt", smooth.state_dict()), *flat, said
        )
    from safetensors.torch import save_file

    half = {f"encoder.{name}": t.half().clone() for name, t in net.state_dict().items()}
    save_file(half, str(folder / "half.safetensors"))
    yield Case("m", "safetensors, half precision", folder / "half.safetensors", *flat, known)
    scripted = torch.jit.trace(net, own[0])
    torch.jit.save(scripted, str(folder / "scripted.pt"))
    yield Case(
        "n",
        "TorchScript file",
        folder / "scripted.pt",
        *flat,
        known,
        "state_dict",
        scripted.state_dict(),
    )


def tried(case: Case, model: Any, options: argparse.Namespace) -> tuple[str, str]:
    """What it was read as, and the verdict (or the loss after two steps)."""
    told = dict(case.options)
    if options.quick:
        knowledge = told.get("knowledge") or rs.Knowledge()
        knowledge = knowledge.replace(shape=tuple(case.data[0].shape[1:]))
        read = as_network(model, told.get("arch"), knowledge.shape)
        read = read.replace(task=told.get("task", read.task))
        config = rs.attacks.Auto(steps=2, restarts=1, candidates=10)
        found = rs.attack(read, knowledge, config)
        return read.arch, f"{found.attack}, loss {float(found.loss.min()):.3g}"
    result = rs.audit(
        model,
        data=case.data,
        holdout=case.holdout,
        effort=options.effort,
        steps=options.steps,
        **told,
    )
    loss = None if result.membership is None else result.membership.loss
    auc = "" if loss is None else f", AUC of the losses {loss.auc:.2f}"
    return result.checkpoint.arch, f"{result.verdict.outcome}{auc}"


def main(arguments: list[str] | None = None) -> list[tuple[str, str, str, str]]:
    """Kind, what was given, what it was read as (or the refusal), and how it ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="kinds, such as b,f,l")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--quick", action="store_true", help="two steps of an attack, no audit")
    options = parser.parse_args(arguments)
    wanted, rows = {*options.only.split(",")} - {""}, []
    with tempfile.TemporaryDirectory(prefix="residuum-example-") as folder:
        for case in cases(options.epochs, Path(folder)):
            if wanted and case.kind.rstrip("'") not in wanted:
                continue
            try:
                row = (case.kind, case.what, *tried(case, case.model, options))
            except rs.ResiduumError as problem:
                if not case.refused or case.refused not in str(problem):
                    raise
                ended = "refused"
                if case.instead is not None:
                    read, ended = tried(case, case.instead, options)
                    ended = f"refused; as advised: {read}, {ended}"
                row = (case.kind, case.what, " ".join(str(problem).split()), ended)
            rows.append(row)
            print(" | ".join(row), flush=True)
    return rows


if __name__ == "__main__":
    main()
