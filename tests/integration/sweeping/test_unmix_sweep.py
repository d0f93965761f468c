"""Sweeps of unmix: its own settings are varied, agreement ranks them, and trials are pooled."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import residuum as rs
from residuum.attacks.registry import rebuild_attack
from residuum.attacks.unmixing.attack import LADDER, apply_settings, confidence_by_share
from residuum.attacks.unmixing.ica import Effort, unmix
from residuum.cli.main import main
from residuum.errors import InputError
from residuum.io.checkpoints import save_checkpoint
from residuum.similarity import ncc
from residuum.sweeping import Range, SweepRequest, sweep
from residuum.sweeping.scoring import SweepRun
from residuum.sweeping.space import UNMIX_SPACE
from tests.integration.attacks.test_unmix_attack import planted, start_of
from tests.program import Capture, printed
from tests.unit.attacks.test_unmix import QUICK, SHAPE, blocks, mixture

CONFIG = rs.attacks.Unmix(restarts=2, seconds=0.01)


def plan(trials: int = 4, **changes: Any) -> SweepRequest:
    return SweepRequest(**{"trials": trials, "seed": 3, "attack": CONFIG} | changes)


def test_named_settings_replace_those_of_the_ladder_and_restarts_are_runs() -> None:
    assert apply_settings(CONFIG, LADDER[0]) == LADDER[0]
    settings = CONFIG.changed(rank=0.7, strength=3.0, starts=5)
    assert apply_settings(settings, Effort()) == Effort(
        ranks=(0.7,), strengths=(3.0,), starts=5, repeats=CONFIG.restarts
    )
    assert apply_settings(settings, LADDER[0]).overfull_partitions == ()
    reconstruction = rs.attack(planted()[0], None, settings.changed(restarts=3))
    assert reconstruction.restarts == 3
    assert reconstruction.selection is not None
    assert reconstruction.selection.support.max() == 3
    with pytest.raises(InputError, match=r"^rank must be at least 0 and at most 1"):
        rs.attacks.Unmix(rank=1.2)


def test_repeats_agree_on_planted_images_and_on_nothing_in_noise() -> None:
    noise = torch.randn(60, 1728, generator=torch.Generator().manual_seed(3))
    full_rank = dataclasses.replace(QUICK, ranks=(1.0,))
    twice = dataclasses.replace(full_rank, repeats=2)
    planted_rows = mixture(blocks(12), noise=1e-3)
    assert unmix(planted_rows, SHAPE, full_rank).runs == (1, 0)
    true, false = (unmix(rows, SHAPE, twice, rank=12) for rows in (planted_rows, noise))
    assert true.runs[0] == false.runs[0] == 2
    assert (true.support == 1.0).float().mean() > 0.8
    assert (false.support == 1.0).float().mean() < 0.2


def test_a_sweep_varies_rank_and_strength_ranks_by_agreement_and_pools(tmp_path: Path) -> None:
    checkpoint, x = planted()
    data = rs.Dataset(x, torch.tensor([1.0, -1.0] * 5).double())
    other = rs.Dataset(blocks(200, seed=7).double(), torch.tensor([1.0, -1.0] * 100).double())
    sweep_plan = plan(attack=CONFIG.changed(starts=4))
    done = sweep(checkpoint, out=tmp_path / "s", data=data, holdout=other, **dict(sweep_plan))
    assert done.request.space == UNMIX_SPACE
    assert done.request.objectives == ("expected",)
    assert {t.state for t in done.trials} == {"complete"}, done.summary["failures"]
    assert {t.residual for t in done.trials} == {None}
    expected = [t.expected for t in done.order]
    assert expected == sorted(expected, reverse=True)
    assert expected[0] > expected[-1]
    assert len({t.params["strength"] for t in done.trials}) == 4
    # What a trial kept is the attack it names.
    stored = SweepRun(tmp_path / "s").load(2)
    assert stored is not None
    reconstruction = rs.attack(checkpoint, None, rebuild_attack(stored))
    assert torch.equal(reconstruction.x, stored.x)
    # A group's confidence is that of the share of trials that hold it.
    assert done.reconstruction is not None
    chosen = done.reconstruction.selection
    assert chosen is not None
    assert done.pool.runs == 4
    assert torch.allclose(chosen.confidence, confidence_by_share(chosen.support / 4, 4, 1728))
    assert (
        len(chosen) == int((ncc(chosen.x, x).abs().amax(0) > 0.9).sum()) >= 5
    )  # each is another one
    assert (ncc(chosen.x, other.x).abs().amax(0) < 0.8).all()
    assert done.scored is not None
    assert done.scored.pooled.metrics["ncc"].recovered >= 6
    report = (tmp_path / "s/report.html").read_text()
    assert "Reconstructions expected to be real" in report
    assert "many expected reconstructions with recovered samples" in report


def test_a_stopped_sweep_goes_on_and_tpe_takes_part(tmp_path: Path) -> None:
    def stop(progress: Any) -> None:
        assert progress.best >= 0
        if progress.fresh == 2:
            raise KeyboardInterrupt

    sweep_plan = plan(3, sampler="tpe", wave=2, space={"starts": Range(1, 3, integer=True)})
    with pytest.raises(KeyboardInterrupt):
        sweep(planted()[0], out=tmp_path / "s", watch=stop, **dict(sweep_plan))
    done = sweep(planted()[0], out=tmp_path / "s", **dict(sweep_plan))
    assert (done.fresh, len(done.order)) == (1, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"space": {"lr_x": Range(0.1, 1)}}, "of unmix cannot vary 'lr_x'"),
        ({"rungs": 1}, "needs an attack that runs in steps; unmix has no steps"),
        ({"batch": 2}, "the sweep also varies rank"),
        ({"objectives": ("residual",)}, "because the attack 'unmix' has no residual"),
        ({"attack": CONFIG.changed(restarts=1)}, "Ranking by agreement compares the restarts"),
    ],
)
def test_plans_of_unmix_that_make_no_sense_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        plan(**changes)


def test_a_network_that_unmix_does_not_apply_to_is_refused_before_the_first_trial(
    tmp_path: Path,
) -> None:
    checkpoint, _ = planted()
    untrained = checkpoint.replace(theta=start_of(checkpoint))
    with pytest.raises(InputError, match="does not apply to this network: fewer than two"):
        sweep(untrained, out=tmp_path / "s", **dict(plan()))
    assert not (tmp_path / "s").exists()


def test_the_command_line_sweeps_unmix(tmp_path: Path, capsys: Capture) -> None:
    save_checkpoint(planted()[0], tmp_path / "m.safetensors")
    code = main(
        [
            "sweep",
            str(tmp_path / "m.safetensors"),
            "--attack",
            "unmix",
            "--trials",
            "2",
            "--shape",
            "3,24,24",
            "--seconds",
            "0.01",
            "--out",
            str(tmp_path / "s"),
            "--json",
        ]
    )
    output = printed(capsys)
    assert code == 0
    assert output["counts"]["complete"] == 2
    assert output["plan"]["objectives"] == ["expected"]
