"""What is stored with the weights in a file, and that attacks on the file use it."""

from __future__ import annotations

import pickle
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from torch import nn

import residuum as rs
from residuum.attacks import OptimizerState
from residuum.attacks.stationarity.objectives import Moment
from residuum.cli.main import main
from residuum.errors import InputError
from residuum.io.release import open_release
from residuum.io.release_knowledge import add_stored_knowledge, read_stored_knowledge
from residuum.surfaces.surface import MOMENT, SURFACES
from tests.program import Capture, one_line, printed


def network() -> nn.Sequential:
    """Two layers of one shape, so that order matters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 6),
        nn.ReLU(),
        nn.Linear(6, 6),
        nn.ReLU(),
        nn.Linear(6, 6),
        nn.ReLU(),
        nn.Linear(6, 1),
    )


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(9, 5, generator=torch.Generator().manual_seed(step))
        (model(x) - 1).square().mean().backward()
        optimizer.step()
    return optimizer


def by_kind(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases in two groups, as many scripts have them."""
    named = dict(model.named_parameters())
    return [
        {"params": [p for n, p in named.items() if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if n.endswith("bias")], "weight_decay": 0.0},
    ]


OPTIMIZERS = {
    "momentum": lambda m: torch.optim.SGD(m.parameters(), 0.01, 0.9),
    "decayed": lambda m: torch.optim.SGD(m.parameters(), 0.01, 0.9, weight_decay=0.1),
    "dampened": lambda m: torch.optim.SGD(m.parameters(), 0.01, 0.9, 0.5, weight_decay=0.1),
    "adam": lambda m: torch.optim.Adam(m.parameters()),
    "adam, coupled": lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), weight_decay=0.1),
    "groups": lambda m: torch.optim.SGD(by_kind(m), 0.01, 0.9),
    "named": lambda m: torch.optim.Adam(list(m.named_parameters())[::-1], weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_moment_in_a_file_is_that_of_the_live_optimizer(tmp_path: Path, name: str) -> None:
    for prefix in ["", "module."]:
        model = network()
        optimizer = trained(model, OPTIMIZERS[name](model))
        weights = {f"{prefix}{n}": t for n, t in model.state_dict().items()}
        state = optimizer.state_dict()
        if prefix:  # names that an optimizer was given have the prefix too
            for group in state["param_groups"]:
                if "param_names" in group:
                    group["param_names"] = [f"{prefix}{n}" for n in group["param_names"]]
        torch.save({"model": weights, "optimizer": state}, tmp_path / "m.pt")
        knowledge = read_stored_knowledge(
            open_release(tmp_path / "m.pt"), rs.load_checkpoint(tmp_path / "m.pt")
        ).moment
        live = rs.read_moment(optimizer, model)
        assert knowledge is not None
        assert {*knowledge} == {*live}
        assert all(torch.allclose(knowledge[n], live[n], atol=1e-7) for n in live)


def test_layers_that_were_frozen_have_no_equation(tmp_path: Path) -> None:
    model = network()
    head = [p for n, p in model.named_parameters() if n.startswith(("4", "6"))]
    optimizer = trained(model, torch.optim.SGD(head, 0.01, 0.9))
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "m.pt")
    released = rs.load_checkpoint(tmp_path / "m.pt")
    knowledge = add_stored_knowledge(open_release(tmp_path / "m.pt"), released, rs.Knowledge())
    surface = SURFACES[MOMENT](released, knowledge)
    assert any(
        "last parameters that fit" in note
        for note in read_stored_knowledge(open_release(tmp_path / "m.pt"), released).notes
    )
    assert surface.equations == ("layers.2", "layers.3")
    live = {n: optimizer.state[p]["momentum_buffer"] for n, p in zip("wbwb", head, strict=True)}
    assert torch.equal(surface.target["layers.3.bias"], live["b"])


def test_a_bare_or_foreign_file_grants_nothing(tmp_path: Path) -> None:
    model = network()
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    released = rs.load_checkpoint(tmp_path / "bare.pt")
    assert (
        add_stored_knowledge(
            open_release(tmp_path / "bare.pt"), released, rs.Knowledge()
        ).known_names
        == ()
    )
    other = nn.Linear(3, 2)
    state = torch.optim.SGD(other.parameters(), 0.1, 0.9)
    other(torch.randn(4, 3)).sum().backward()
    state.step()
    torch.save({"model": model.state_dict(), "optimizer": state.state_dict()}, tmp_path / "m.pt")
    assert read_stored_knowledge(open_release(tmp_path / "m.pt"), released).moment is None


def estimator(**settings: Any) -> tuple[Any, np.ndarray]:
    from sklearn.neural_network import MLPClassifier

    x = np.random.default_rng(0).normal(size=(40, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MLPClassifier((9, 4), max_iter=5, **settings).fit(x, np.arange(40) % 3), x


@pytest.mark.parametrize("solver", ["adam", "sgd"])
@pytest.mark.parametrize("packed", [0, 3])
def test_an_estimator_is_read_with_its_moment_and_start(
    tmp_path: Path, solver: str, packed: int
) -> None:
    model, x = estimator(solver=solver, random_state=3)
    joblib.dump(model, tmp_path / "m.joblib", compress=packed)
    released = rs.load_checkpoint(tmp_path / "m.joblib")
    knowledge = add_stored_knowledge(open_release(tmp_path / "m.joblib"), released, rs.Knowledge())
    assert knowledge.provenance == {"theta0": "release", "moment": "release"}
    live = rs.read_moment(model)
    assert knowledge.moment is not None
    assert all(torch.allclose(knowledge.moment[n], t) for n, t in live.items())
    outputs = released.copy_module()(torch.from_numpy(x).to(next(iter(released.theta.values()))))
    assert np.allclose(outputs.softmax(1).detach().numpy(), model.predict_proba(x), atol=1e-6)


def test_steps_before_a_network_are_said(tmp_path: Path) -> None:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model, x = estimator()
    pipeline = make_pipeline(StandardScaler().fit(x), model)
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(pipeline))
    assert "StandardScaler" in " ".join(rs.load_checkpoint(tmp_path / "m.pkl").assumptions)


def test_a_pickle_without_a_network_is_refused_with_advice(tmp_path: Path, capsys: Capture) -> None:
    from sklearn.neighbors import KNeighborsClassifier

    model = KNeighborsClassifier(1).fit(np.eye(3), [0, 1, 2])
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(model))
    assert main(["attack", str(tmp_path / "m.pkl"), "--dry-run"]) == 2
    assert "for which residuum has no attack" in one_line(capsys)


def test_the_moment_of_samples_is_explained_by_those_samples_and_by_no_others() -> None:
    """Exact case and control: the gradient of the loss, and covectors read off it."""
    from residuum.attacks.stationarity.problem import Problem

    for outputs in (1, 3):
        torch.manual_seed(outputs)
        model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, outputs)).double()
        x = torch.randn(6, 5, dtype=torch.float64)
        y = torch.arange(6) % max(2, outputs)
        z = model(x)
        if outputs == 1:
            sign = 2.0 * y - 1
            nn.functional.softplus(-sign * z[:, 0]).sum().backward()
            labels, lam = sign, torch.sigmoid(-sign * z[:, 0].detach())
        else:
            nn.functional.cross_entropy(z, y, reduction="sum").backward()
            labels, lam = y, z.detach().softmax(1)
        checkpoint = rs.checkpoint_from_module(model)
        own_parameters = dict(model.named_parameters())
        moment = {n: own_parameters[checkpoint.source_names[n]].grad for n in checkpoint.theta}
        problem = Problem(
            checkpoint.copy_module(),
            Moment(),
            rs.Knowledge(moment=moment),
            labels,
            surrogate="none",
            layers="all",
        )
        assert float(problem.evaluate(x[None], lam[None]).loss) < 1e-24
        assert float(problem.evaluate(-x[None], lam[None]).loss) > 1e-2


def test_attacks_on_a_file_use_what_is_stored_with_the_weights(
    tmp_path: Path, capsys: Capture
) -> None:
    model = network()
    optimizer = trained(model, OPTIMIZERS["adam"](model))
    torch.save({"model": model.state_dict(), "o": optimizer.state_dict()}, tmp_path / "m.pt")
    config = OptimizerState(steps=5, restarts=1, candidates=4)
    reconstruction = rs.attack(
        tmp_path / "m.pt", None, rs.attacks.Auto.like(config), surface="moment"
    )
    assert reconstruction.attack == "moment"
    assert reconstruction.knowledge.provenance["moment"] == "release"
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    with pytest.raises(InputError, match="optimizer"):
        rs.attack(tmp_path / "bare.pt", None, config)
    command = ["attack", "moment", str(tmp_path / "m.pt"), "--steps", "5"]
    assert main([*command, "--out", str(tmp_path / "run"), "--json"]) == 0
    assert printed(capsys)["attack"] == "moment"
    assert main(["audit", str(tmp_path / "m.pt"), "--dry-run", "--json"]) == 0
    rows = {row["what"]: row["status"] for row in printed(capsys)["applies"]}
    assert rows["moment"] == "to be tried"


ODD: list[Any] = [None, 5, "x\x1b[31m\n", [], {}, [[1]], {"a": 1}, float("nan"), b"raw", 2**70]


def test_values_of_the_wrong_kind_are_refused_or_passed_over(tmp_path: Path) -> None:
    """An estimator and a checkpoint with one value after another replaced by something else."""
    model, _ = estimator(random_state=3)
    saved = network()
    state = trained(saved, OPTIMIZERS["adam"](saved)).state_dict()
    content: dict[str, Any] = {"model": saved.state_dict(), "optimizer": state}
    names = ["coefs_", "intercepts_", "_optimizer", "activation", "classes_", "random_state"]
    names += ["_best_coefs", "t_", "n_iter_", "batch_size", "alpha"]
    for i, name in enumerate(names):
        for odd in ODD[i % 3 :: 3]:
            broken = pickle.loads(pickle.dumps(model))
            setattr(broken, name, odd)
            file = tmp_path / "m.pkl"
            file.write_bytes(pickle.dumps(broken))
            assert main(["scan", str(file), "--quiet", "--fail-on", "none"]) in (0, 2, 4), (
                name,
                odd,
            )
            with suppress(rs.ResiduumError):
                add_stored_knowledge(open_release(file), rs.load_checkpoint(file), rs.Knowledge())
    for place in ("state", "param_groups"):
        for odd in ODD:
            inner = {**content["optimizer"], place: odd}
            file = tmp_path / "m.pt"
            torch.save({**content, "optimizer": inner}, file)
            assert main(["scan", str(file), "--quiet", "--fail-on", "none"]) in (0, 2, 4), (
                place,
                odd,
            )
            with suppress(rs.ResiduumError):
                add_stored_knowledge(open_release(file), rs.load_checkpoint(file), rs.Knowledge())


def test_names_out_of_a_file_reach_no_terminal_as_commands(tmp_path: Path, capsys: Capture) -> None:
    content = {"w": torch.zeros(3, 2), "train_data": {"\x1b[31m\n": torch.zeros(3, 2)}}
    torch.save(content, tmp_path / "m.pt")
    assert main(["scan", str(tmp_path / "m.pt")]) == 1
    assert "\x1b" not in capsys.readouterr().out
