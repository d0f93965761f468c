"""Pooling over runs against its naive reference, the report, both rankings, and the command."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from residuum.attacks import estimate
from residuum.cli.main import main
from residuum.io.checkpoints import save_checkpoint
from residuum.records import Dataset, Knowledge, Reconstruction
from residuum.report.charts import Coordinate, draw_parallel_coordinates
from residuum.report.html import Item, render_sweep
from residuum.sweeping.pooling import Pool, pool_trials
from residuum.sweeping.scoring import score_rankings
from residuum.sweeping.space import estimate_cost
from tests import pages
from tests.cases import relu_point
from tests.sweeps import KNOWLEDGE, plan, sweep_victim, trial_facts, victim

DIM = 40


def planted(runs: int, seed: int = 0, noise: float = 0.15) -> tuple[Tensor, list[Reconstruction]]:
    """Five true samples, each found by every other run, in clouds of candidates that mean nothing."""
    rng = torch.Generator().manual_seed(seed)
    true = torch.randn(5, DIM, generator=rng, dtype=torch.float64)
    reconstructions = []
    for run in range(runs):
        held = [k for k in range(5) if (run + k) % 2 == 0]
        copies = true[held] + noise * torch.randn(
            len(held), DIM, generator=rng, dtype=torch.float64
        )
        noise_samples = torch.randn(20, DIM, generator=rng, dtype=torch.float64)
        labels = torch.tensor([1.0 if k < 3 else -1.0 for k in held] + [1.0, -1.0] * 10)
        weight = 0.5 + torch.rand(len(held) + 20, generator=rng, dtype=torch.float64)
        reconstructions.append(
            reconstruction(torch.cat([copies, noise_samples]), labels, (run + 1) * weight)
        )
    return true, reconstructions


def reconstruction(
    x: Tensor, labels: Tensor, lam: Tensor, status: str = "finished"
) -> Reconstruction:
    none = torch.zeros(1, 0)
    return Reconstruction(
        "binary-kkt",
        x,
        labels,
        lam,
        torch.zeros(len(x), dtype=torch.long),
        torch.zeros(0, dtype=torch.long),
        none,
        none[:, :, None],
        (),
        (status,),
        Knowledge(),
    )


def naive(reconstructions: list[Reconstruction], similarity: float = 0.9) -> list[dict[str, Any]]:
    """The rule of ``pooling.py``, one candidate at a time."""
    groups: list[dict[str, Any]] = []
    for run, reconstruction in enumerate(reconstructions):
        weight = reconstruction.lam / reconstruction.lam.max()
        before, new = list(groups), []
        for i in weight.argsort(descending=True).tolist():
            x, label = reconstruction.x[i], float(reconstruction.labels[i])
            means = [g["sum"] / g["weight"] for g in before]
            close_groups = [
                (float(torch.cosine_similarity(x, m, 0)), g)
                for m, g in zip(means, before, strict=True)
                if g["label"] == label
            ]
            close_groups = [pair for pair in close_groups if pair[0] >= similarity]
            if close_groups:
                home = max(close_groups, key=lambda pair: pair[0])[1]
                home.setdefault("waiting", []).append((i, x))
                continue
            groups_joined = [
                g
                for g in new
                if g["label"] == label
                and float(torch.cosine_similarity(x, g["first"], 0)) >= similarity
            ]
            if groups_joined:
                groups_joined[0]["waiting"].append((i, x))
            else:
                new.append(
                    {
                        "label": label,
                        "first": x,
                        "sum": torch.zeros(DIM).double(),
                        "weight": 0.0,
                        "members": 0,
                        "runs": set(),
                        "waiting": [(i, x)],
                    }
                )
        groups += new
        for group in groups:
            for i, x in group.pop("waiting", []):
                group["sum"] = group["sum"] + weight[i] * x
                group["weight"] += float(weight[i])
                group["members"] += 1
                group["runs"].add(run)
    return groups


def test_pooling_equals_its_naive_reference() -> None:
    true, reconstructions = planted(12)
    slow = sorted(naive(reconstructions), key=lambda g: (-len(g["runs"]), -g["weight"]))
    pool = Pool()
    for reconstruction in reconstructions:
        pool.add(reconstruction)
    chosen, _ = pool.selection()
    assert len(pool) == len(slow)
    agreed = [g for g in slow if len(g["runs"]) > 1]
    assert chosen.support.tolist() == [len(g["runs"]) for g in agreed]
    assert chosen.members.tolist() == [g["members"] for g in agreed]
    means = torch.stack([g["sum"] / g["weight"] for g in agreed])
    assert torch.allclose(chosen.x, means, atol=1e-12)
    best = torch.cosine_similarity(chosen.x[:5, None], true[None], dim=2)
    assert sorted(best.argmax(1).tolist()) == [0, 1, 2, 3, 4]
    assert float(best.max(1).values.min()) > 0.99, "a mean of six is nearer than any of them"
    assert chosen.support[:5].tolist() == [6] * 5
    assert len(chosen) == 5, "noise in 40 dimensions agrees with nobody"


def test_tightness_is_the_mean_cosine() -> None:
    _, reconstructions = planted(12)
    pool = Pool()
    for reconstruction in reconstructions:
        pool.add(reconstruction)
    chosen, _ = pool.selection()
    all_candidates = torch.cat([p.x for p in reconstructions])
    weight = torch.cat([p.lam / p.lam.max() for p in reconstructions])
    inner = torch.cosine_similarity(chosen.x[0][None], all_candidates)
    is_close = inner > 0.8
    expected = float((weight * inner)[is_close].sum() / weight[is_close].sum())
    assert float(chosen.features[0, 2]) == pytest.approx(expected, abs=1e-6)


def test_memory_is_bounded_and_what_agrees_survives() -> None:
    _, reconstructions = planted(60)
    sizes = []

    def one_by_one() -> Iterator[Reconstruction]:
        yield from reconstructions

    pooled, wide = pool_trials(one_by_one(), Knowledge(), {})
    pool = Pool(limit=100)
    for reconstruction in reconstructions:
        pool.add(reconstruction)
        sizes.append(len(pool))
    assert len(wide) > 1000
    assert max(sizes) <= 125, "a quarter more at most"
    assert pool.dropped > 1000
    narrow, _ = pool.selection()
    assert narrow.support[:5].tolist() == pooled.selection.support[:5].tolist() == [30] * 5
    assert torch.allclose(narrow.x[:5], pooled.selection.x[:5])


def test_diverged_runs_and_broken_candidates_are_left_out() -> None:
    x = torch.eye(3, DIM, dtype=torch.float64)
    x[1] = math.nan
    x[2] = 0
    ones, lam = torch.ones(3), torch.ones(3, dtype=torch.float64)
    pool = Pool()
    pool.add(reconstruction(x, ones, lam, "diverged"))
    assert (pool.runs, len(pool)) == (0, 0)
    pool.add(reconstruction(x, ones, lam))
    assert (pool.runs, pool.candidates, len(pool)) == (1, 1, 1)
    assert pool_trials([], Knowledge(), {})[0] is None


def test_points_in_a_plane_are_pooled_by_distance() -> None:
    angles = torch.tensor([0.0, 0.01, 0.2], dtype=torch.float64)
    x = torch.stack([angles.cos(), angles.sin()], 1)
    pool = Pool()
    for row in (x[:1], x[1:2], x[2:]):
        pool.add(reconstruction(row, torch.ones(1), torch.ones(1, dtype=torch.float64)))
    assert len(pool) == 2
    assert pool.selection()[0].support.tolist() == [2], "the other group is of one run"


def test_parallel_coordinates_lie_on_their_axes() -> None:
    values = [1e-4, 1e-2, 1.0]
    drawing = draw_parallel_coordinates(
        [
            Coordinate("lr_x", values, True, 1e-4, 1.0),
            Coordinate("residual", [0.1, 0.2, None], False, 0.0, 0.2),
        ]
    )
    names = re.findall(r'<text class="name"[^>]* x="(\d+)"[^>]*>([^<]*)', drawing)
    assert names == [("60", "lr_x"), ("900", "residual")]
    ticks = re.findall(r'<text class="tick"[^>]* y="([^"]*)">([^<]*)', drawing)
    assert [text for _, text in ticks] == ["0.0001", "0.01", "1", "0", "0.1", "0.2"]
    heights = [float(y) for y, _ in ticks[:3]]  # of the base line of the text
    assert heights == pytest.approx([304, 177, 50], abs=1)
    lines = re.findall(r'<path class="(trial[^"]*)" d="([^"]*)"', drawing)
    assert lines[-1] == ("trial best", "M60 300L900 173"), "the best is drawn last, on top"
    assert lines[0] == ("trial", "M60 46"), "what is not known is left out"
    assert draw_parallel_coordinates([]) == ""


def test_a_report_shows_hostile_names_as_text() -> None:
    bad = pages.HOSTILE[0]
    item = Item(
        number=1,
        reconstruction=pages.digits(1)[0][0],
        label=bad,
        confidence=0.5,
        support=3,
        restarts=4,
    )
    text = render_sweep(
        subject=bad,
        headline="headline",
        sentence=bad,
        columns=("trial",),
        rows=(("1", bad),),
        coordinates=(Coordinate("lr_x", [0.1, 0.2]),),
        choice=(bad,),
        items=(item,),
        failures=((bad, 2),),
        notes=(bad,),
        settings={bad: bad},
        shape=(1, 8, 8),
    )
    assert "<script" not in text
    assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text
    assert text.count("data:image/png") == 1
    assert "http://" not in text.replace("http://www.w3.org", "")


def test_both_rankings_and_no_influence_of_the_data(tmp_path: Path) -> None:
    done = sweep_victim(tmp_path / "s", plan(4))
    before = [trial_facts(t) for t in done.order]
    point = relu_point()
    train = Dataset(point.x, point.y)
    rng = torch.Generator().manual_seed(0)
    other = torch.randn(200, 12, generator=rng, dtype=torch.float64)
    holdout = Dataset(other, torch.ones(200).double() - 2 * (torch.arange(200) % 2))
    rankings = score_rankings(done, tmp_path / "s", train, holdout)
    document = rankings.to_json()
    assert document["without_data"] == [t.number for t in before]
    assert sorted(document["with_data"]) == sorted(document["without_data"])
    counts = [row["recovered"] for row in rankings.by_data]
    assert counts == sorted(counts, reverse=True)
    assert document["lost"] == counts[0] - document["chosen"]["recovered"] >= 0
    repeated = sweep_victim(tmp_path / "s", plan(4))
    assert [trial_facts(t) for t in repeated.order] == before


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    point = relu_point()
    model = save_checkpoint(victim(), tmp_path / "model.safetensors")
    Dataset(point.x, point.y).to_npz(tmp_path / "train.npz")
    out = tmp_path / "s"
    arguments = [
        "sweep",
        str(model),
        "--trials",
        "3",
        "--steps",
        "50",
        "--candidates",
        "12",
        "--search",
        "lr_x=1e-3:1:log",
        "--search",
        "split-every=100:300",
        "--rank-by",
        "residual,agreement",
        "--data",
        str(tmp_path / "train.npz"),
        "--out",
        str(out),
    ]
    assert main([*arguments, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["counts"] == {"complete": 3, "pruned": 0, "failed": 0}
    assert summary["ranking"] == summary["rankings"]["without_data"]
    assert all(set(t["params"]) == {"lr_x", "split_every"} for t in summary["trials"])
    assert all(isinstance(t["params"]["split_every"], int) for t in summary["trials"])
    names = {path.name for path in out.iterdir()}
    assert {"sweep.json", "report.html", "study.journal", "rankings.json", "attack.json"} <= names
    assert out.stat().st_mode & 0o777 == 0o700
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "3 complete" in output
    assert "0 trials ran in this session" in output
    assert (
        main(["score", str(out), "--data", str(tmp_path / "train.npz"), "--ckpt", str(model)]) == 0
    )
    assert "not the checkpoint" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--search", "lr_x=1"], "NAME=LOW:HIGH"),
        (["--search", "lr_x=1:2:cubic"], "NAME=LOW:HIGH"),
        (["--search", "steps=1:2"], "cannot vary 'steps'"),
        (["--rank-by", "recovered"], "--rank-by must be 'residual'"),
        ([], "needs a folder"),
    ],
)
def test_usage(options: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    model = save_checkpoint(victim(), tmp_path / "model.safetensors")
    assert main(["sweep", str(model), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_sweep_without_a_complete_trial_is_inconclusive(tmp_path: Path, capsys: Any) -> None:
    model = save_checkpoint(victim(), tmp_path / "model.safetensors")
    arguments = [
        "sweep",
        str(model),
        "--trials",
        "2",
        "--steps",
        "50",
        "--candidates",
        "12",
        "--search",
        "lr_lam=1e5:1e6",
        "--constraint",
        "penalty",
        "--optimizer",
        "sgd",
        "--lr-x",
        "1e-6",
        "--out",
        str(tmp_path / "s"),
        "--json",
    ]
    assert main(arguments) == 3
    printed = json.loads(capsys.readouterr().out)
    assert "diverged" in printed["error"]
    summary = json.loads((tmp_path / "s/sweep.json").read_text())
    assert summary["failures"] == {"diverged": 2}
    assert "No trial was complete" in (tmp_path / "s/report.html").read_text()


def test_a_dry_run_counts_what_halving_saves(tmp_path: Path, capsys: Any) -> None:
    model = save_checkpoint(victim(), tmp_path / "model.safetensors")
    arguments = ["sweep", str(model), "--trials", "9", "--steps", "900", "--rungs", "2"]
    assert main([*arguments, "--dry-run", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    hours_per_trial = output["seconds_per_trial"] / 3600
    # 9 to step 100, 3 on to 300, 1 on to 900: 2100 steps of 8100.
    assert output["hours_of_this_sweep"] == pytest.approx(2100 / 8100 * 9 * hours_per_trial)
    assert output["hours_of_10000_runs"] == pytest.approx(2100 / 8100 * 5000 * hours_per_trial)
    plain = estimate_cost(
        plan(9, 900), estimate(victim(), KNOWLEDGE, plan(9, 900).attack, measured=0.01)
    )
    assert plain["hours_of_this_sweep"] == pytest.approx(9 * plain["seconds_per_trial"] / 3600)
    assert not (tmp_path / "s").exists()
