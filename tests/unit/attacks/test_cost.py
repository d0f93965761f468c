"""The cost model against a counter of the operations that were really carried out."""

from __future__ import annotations

import json
from itertools import cycle, product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from residuum.attacks import Auto, ModelInversion, estimate
from residuum.attacks.cost import estimate_reference_seconds
from residuum.attacks.stationarity.problem import Problem
from residuum.attacks.work import REFERENCE, count_work
from residuum.cli.main import main
from residuum.engine.explicit import evaluation_cost
from residuum.errors import InputError
from residuum.io.checkpoints import save_checkpoint
from residuum.networks import MLP, Architecture
from residuum.networks.network import Network
from residuum.records import Knowledge
from residuum.surfaces.surface import WEIGHTS, build_surfaces
from tests.cases import SPREAD, attack_case

HIDDEN = [(5,), (5, 7), (5, 7, 6), (5, 3, 7, 4)]


def released(arch="mlp:6-9-1"):
    torch.manual_seed(0)
    return Network(dict(Architecture.parse(arch).build().state_dict()), arch)


@pytest.mark.parametrize(("objective", "outputs"), SPREAD)
def test_the_formula_counts_what_is_done(objective, outputs):
    # The sizes come round so that every depth meets every one of them.
    sizes = cycle([(2**20, 2**30), (9000, 9000), (3000, 1)])
    for measure, layers, hidden in product([True, False], ["all", "first"], HIDDEN):
        case = attack_case(MLP((*hidden, outputs), "all"), objective, outputs, (5,), 12)
        problem = Problem(case.model, objective, case.knowledge, case.labels, layers=layers)
        problem.explicit.chunk, problem.explicit.workspace = next(sizes)
        with FlopCounterMode(display=False) as counter:
            problem.evaluate(case.x, case.lam, 4.0, measure)
        cost = evaluation_cost(
            problem.explicit, 2, 12, follows_outputs=objective.follows_outputs, measure=measure
        )
        assert sum(cost.flops) == counter.get_total_flops()
        assert len(cost.flops) == len(hidden)


def test_a_step_on_the_published_shape_is_twelve_products():
    """5 d h + 7 h h of 2 m each, and next to nothing for the last layer."""
    with torch.device("meta"):
        model = MLP((3072, 1000, 1000, 1))
    target = dict(model.state_dict())
    from residuum.engine.explicit import ExplicitEquation

    equation = ExplicitEquation([model], target, [1.0, 1.0, 1.0])
    cost = evaluation_cost(equation, 1, 1000)
    assert sum(cost.flops) == pytest.approx(44.7e9, rel=2e-3)
    assert cost.flops[0] == 5 * 2 * 1000 * 3072 * 1000
    assert cost.flops[1] == 7 * 2 * 1000 * 1000 * 1000


def test_memory_stays_bounded_while_candidates_grow():
    with torch.device("meta"):
        model = MLP((784, 1000, 1000, 1))
    from residuum.engine.explicit import ExplicitEquation

    equation = ExplicitEquation([model], dict(model.state_dict()), [1.0, 0.0, 0.0])
    small, large, huge = (
        evaluation_cost(equation, 1, m).memory for m in (1000, 100_000, 10_000_000)
    )
    assert small["workspace"] < 0.1e9
    assert large["workspace"] < huge["workspace"] < 2.5e9
    assert large["candidates"] == 100 * small["candidates"]


def test_an_estimate_describes_the_attack():
    config = Auto(restarts=3, candidates=20, steps=500)
    cost = estimate(released(), None, config, measured=0.05)
    assert (cost.parameters, cost.candidates, cost.dimensions) == (72, 20, 6)
    assert cost.unknowns == 3 * 20 * (6 + 1)
    assert cost.flops_per_step == sum(cost.flops_by_layer.values())
    assert list(cost.flops_by_layer) == ["layers.0", "layers.1"]
    assert cost.step_seconds > 0
    assert cost.seconds == pytest.approx(500 * cost.step_seconds * (1 + 1 / 25))
    dear = estimate(released(), None, Auto(candidates=20, lam_every=10), measured=0.05)
    assert dear.seconds == pytest.approx(3000 * dear.step_seconds * (1 + 1 / 25 + 21 / 10))
    short = estimate(released(), None, Auto(seconds=1e-6), measured=0.05)
    assert short.seconds == 1e-6
    assert short.candidates == 20


def test_other_networks_are_estimated():
    other = estimate(released("convnet:1x4x4-2-1"), None, Auto(), measured=0.05)
    assert other.flops_per_step > 0
    assert other.memory["passes"] > 0
    with pytest.raises(InputError, match=r"stationarity equation .*; got 'model-inversion'"):
        estimate(released(), None, ModelInversion())


def test_reference_seconds_count_every_step_and_no_clock():
    checkpoint, knowledge = released(), Knowledge()
    surface = build_surfaces(checkpoint, knowledge)[WEIGHTS]
    inversion = ModelInversion(steps=7, candidates=5)
    seconds = estimate_reference_seconds(inversion, surface, knowledge)
    # The second call gives the same result, although properties of the network are cached by then.
    assert seconds == estimate_reference_seconds(inversion, surface, knowledge)
    work = count_work(lambda: inversion.changed(steps=1, dtype="float32").run(surface, knowledge))
    assert seconds == pytest.approx(7 * work.seconds(REFERENCE["cpu"]))
    kkt = Auto(restarts=3, candidates=20, steps=500).resolve_settings(checkpoint, knowledge)
    seconds = estimate_reference_seconds(kkt, surface, knowledge)
    assert seconds == estimate_reference_seconds(kkt, surface, knowledge)
    assert estimate_reference_seconds(kkt.changed(seconds=1e-6), surface, knowledge) == 1e-6
    # A loss is evaluated every 25 steps, and closed-form multipliers cost a step each and one more.
    often = estimate_reference_seconds(kkt.changed(lam_every=10), surface, knowledge)
    assert often / seconds == pytest.approx((1 + 1 / 25 + 21 / 10) / (1 + 1 / 25))


def test_a_dry_run_prints_and_writes_nothing(tmp_path, capsys, monkeypatch):
    # Each dry run measures for two seconds, and the command has no option for this duration.
    monkeypatch.setattr("residuum.attacks.cost.MEASURING_SECONDS", 0.05)
    path = tmp_path / "m.safetensors"
    save_checkpoint(released(), path)
    command = ["attack", str(path), "--dry-run"]
    assert main([*command, "--out", str(tmp_path / "r")]) == 0
    output = capsys.readouterr().out
    for word in ("parameters", "unknowns", "GFLOP per step", "memory", "time per step", "whole"):
        assert word in output
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["memory_bytes"] == sum(document["memory"].values())
    assert document["flops_per_step"] > 0
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.safetensors"]
    assert main(["attack", str(path)]) == 2
    assert "--out" in capsys.readouterr().err
