"""Gradients and weight differences in files: how they are read, and what tells them from weights."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from residuum.errors import CheckpointError, InputError
from residuum.io.checkpoints import as_network
from residuum.io.release import open_release
from residuum.io.updates import read_update, recognize_update, resolve_update
from residuum.records import Knowledge

State = dict[str, Tensor]


def client(n: int = 6, steps: int = 0, seed: int = 0, lr: float = 0.1) -> tuple[State, State]:
    """Return the weights of an MLP, and its gradient (steps = 0) or its difference after SGD."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 5))
    x, y = torch.randn(n, 40), torch.randint(0, 5, (n,))
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for _ in range(max(1, steps)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if steps:
            optimizer.step()
    after = model.state_dict()
    if steps:
        return before, {name: after[name] - before[name] for name in after}
    return before, {name: p.grad.clone() for name, p in model.named_parameters()}


def low_rank_model(start_head_at_zero: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 5))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(30, 4) @ torch.randn(4, 40) / 20)
        if start_head_at_zero:
            model[2].weight.zero_()
            model[2].bias.zero_()
    return model


def test_few_gradients_are_recognized_and_their_weights_are_not() -> None:
    for steps in (0, 1, 5):
        before, update = client(steps=steps)
        assert len(recognize_update(update)) >= 2
        assert recognize_update(before) == ()
        local = {name: before[name] + update[name] for name in before}
        assert recognize_update(local, "delta.pt") == ()
        assert recognize_update(local, "delta.pt", before) == ()
        (sign,) = recognize_update(update, "x.pt", before)
        assert "correlation with the base" in sign


def test_a_single_sign_is_not_enough() -> None:
    """Low rank, a head that began at zero, small weights and a name each occur in networks as well."""
    x, y = torch.randn(50, 40), torch.randint(0, 5, (50,))
    for start_head_at_zero in (False, True):
        model = low_rank_model(start_head_at_zero)
        head = torch.optim.SGD(model[2].parameters(), 0.1)
        for _ in range(5):
            nn.functional.cross_entropy(model(x), y).backward()
            head.step()
        for name in ("model.pt", "model_update.pt"):
            assert recognize_update(model.state_dict(), name) == ()
    before, _ = client()
    small = {name: 1e-3 * t for name, t in before.items()}
    assert recognize_update(small, "model.pt") == ()


def test_a_difference_keeps_its_own_precision() -> None:
    before, gradient = client()
    update = {name: -1e-6 * t for name, t in gradient.items()}
    base = as_network(before)
    read = read_update(update, base, "difference")
    gradients = {base.source_names[name]: t for name, t in read.gradients.items()}
    assert all(torch.equal(gradients[name], -update[name]) for name in update)
    rounded = (before["0.weight"] + update["0.weight"]) - before["0.weight"]
    error = (rounded - update["0.weight"]).norm() / update["0.weight"].norm()
    assert error > 1e-3  # what a subtraction of the base would have left


@pytest.mark.parametrize("form", ["plain", "wrapped", "suffixed", "nested", "list"])
def test_the_names_that_training_code_writes_are_matched(form: str, tmp_path: Path) -> None:
    before, update = client()
    contents = {
        "plain": update,
        "wrapped": {f"module.{name}": t for name, t in update.items()},
        "suffixed": {f"{name}.grad": t for name, t in update.items()},
        "nested": {"gradients": update, "round": 3},
        "list": list(update.values()),
    }
    torch.save(contents[form], tmp_path / "update.pt")
    release = open_release(tmp_path / "update.pt")
    base = as_network(before)
    read = read_update(release, base, "gradient")
    assert {base.source_names[n] for n in read.gradients} == {*update}
    for name, t in read.gradients.items():
        assert torch.equal(t, update[base.source_names[name]])
    alone = read_update(release, None)
    assert alone.kind == "alone"
    assert [t.shape for t in alone.gradients.values()] == [t.shape for t in update.values()]


def test_kind_and_sign_follow_the_names_and_the_last_bias(tmp_path: Path) -> None:
    before, gradient = client(n=4)
    base = as_network(before)
    difference = {name: -0.1 * t for name, t in gradient.items()}
    for update, kind in ((gradient, "gradient"), (difference, "difference")):
        read = read_update(update, base)
        assert read.kind == kind
        knowledge = read.add_to(Knowledge())
        assert knowledge.moment is not None
        share = 1.0 if kind == "gradient" else 0.1
        for name, t in knowledge.moment.items():
            expected = share * gradient[base.source_names[name]]
            assert torch.allclose(t, expected)
    torch.save(difference, tmp_path / "grads.pt")
    assert read_update(open_release(tmp_path / "grads.pt"), base).kind == "gradient"


def test_what_does_not_fit_is_refused() -> None:
    before, update = client()
    base = as_network(before)
    with pytest.raises(CheckpointError, match="names and shapes of the network before the update"):
        read_update({"other": torch.zeros(3)}, base)
    with pytest.raises(CheckpointError, match="finite"):
        read_update({**update, "0.bias": torch.full((30,), torch.nan)}, base)
    for inputs in (("u", "m", "b", None), ("u", None, "b", "a"), ("u", None, None, None, "none")):
        with pytest.raises(InputError, match=r"--update and .* cannot be used"):
            resolve_update(*inputs)
