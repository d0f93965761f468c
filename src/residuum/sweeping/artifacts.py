"""Files of a finished sweep: ``sweep.json``, ``report.html``, and what ``residuum score`` reads."""

from __future__ import annotations

import dataclasses
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from residuum.checkpoints import as_checkpoint, weights_hash
from residuum.records import Checkpoint, Dataset, Knowledge, write_atomic, write_json
from residuum.records.data import samples_file, with_mean
from residuum.records.rundir import environment, sha256
from residuum.report.charts import Coordinate
from residuum.report.gallery import Item
from residuum.report.html import render_sweep
from residuum.report.page import Row as Figure
from residuum.sweeping.engines import Resources
from residuum.sweeping.plan import Plan
from residuum.sweeping.run import Sweep, Watcher, run_trials
from residuum.sweeping.scoring import Rankings, rankings
from residuum.sweeping.study import POOLED
from residuum.sweeping.trials import COMPLETE, FAILED, PRUNED

SUMMARY, REPORT, ATTACK, RANKINGS = "sweep.json", "report.html", "attack.json", "rankings.json"
SHOWN, CARDS = 12, 60


def summary(done: Sweep, request: dict[str, Any], engine: str) -> dict[str, Any]:
    """What ``sweep.json`` says; trials in the order of their numbers, the ranking beside them."""
    states = Counter(trial.state for trial in done.trials)
    found = done.found
    return {
        "plan": done.plan.to_json(),
        "request": request,
        "engine": engine,
        "trials": [trial.to_json() for trial in done.trials],
        "counts": {state: states[state] for state in (COMPLETE, PRUNED, FAILED)},
        "ranking": [trial.number for trial in done.order],
        "front": [trial.number for trial in done.front],
        "best": done.order[0].to_json() if done.order else None,
        "failures": dict(Counter(t.reason for t in done.trials if t.state == FAILED)),
        "pooled": {
            "runs": done.pool.runs,
            "candidates": done.pool.candidates,
            "groups": len(done.pool),
            "groups_dropped": done.pool.dropped,
            "consensus": 0 if found is None else found.to_json()["consensus"],
        },
        "session": {"trials": done.fresh, "seconds": done.seconds, "compute_seconds": done.compute},
        "environment": environment(done.plan.config.device),
    }


def sweep(
    model: Checkpoint | nn.Module | str | Path,
    knowledge: Knowledge | None = None,
    plan: Plan | None = None,
    *,
    out: str | Path | None = None,
    data: Dataset | str | Path | None = None,
    holdout: Dataset | str | Path | None = None,
    arch: str | None = None,
    engine: str = "local",
    resources: Resources | None = None,
    storage: str | None = None,
    watch: Watcher | None = None,
) -> Sweep:
    """Try many settings of an attack; rank them and pool what they find by the weights alone.

    plan: how many trials of which settings; out: run directory, taken up again where it holds this
    sweep, and written to; data, holdout: read once the ranking is fixed, to score it; engine: local,
    processes or ray; storage: an Optuna URL, by default a SQLite file in ``out``.
    """
    if out is None:
        with TemporaryDirectory() as folder:
            return sweep(
                model, knowledge, plan, out=folder, data=data, holdout=holdout, arch=arch,
                engine=engine, resources=resources, storage=storage, watch=watch,
            )  # fmt: skip
    released, out = as_checkpoint(model, arch), Path(out)
    named = isinstance(model, str | Path)
    identity = {"checkpoint_sha256": weights_hash(str(model))} if named else {}
    subject = Path(str(model)).name if named else released.arch
    done = run_trials(
        released, knowledge, plan, out=out, engine=engine, resources=resources, storage=storage,
        identity=identity, watch=watch,
    )  # fmt: skip
    request = {**identity, "arch": released.arch}
    done = dataclasses.replace(done, said=summary(done, request, engine))
    _write(out, done, request, subject)
    if data is not None and done.found is not None:
        train = _samples(data, "train.npz")
        control = None if holdout is None else _samples(holdout, "holdout.npz")
        done = dataclasses.replace(done, scored=rankings(done, out, train, control))
        _write(out, done, request, subject)
    return done


def _samples(data: Dataset | str | Path, name: str) -> Dataset:
    """Read no sooner than here."""
    return data if isinstance(data, Dataset) else Dataset.from_npz(samples_file(Path(data), name))


def _write(out: Path, done: Sweep, request: dict[str, Any], subject: str) -> None:
    """The summary last, before it the report, and the pooled attack's own summary."""
    if done.found is not None:
        asked = {"settings": done.found.settings, **request}
        files = {POOLED: sha256(out / POOLED)}
        write_json(out / ATTACK, {**done.found.to_json(), "request": asked, "sha256": files})
    if done.scored is not None:
        write_json(out / RANKINGS, done.scored.to_json())
    write_atomic(out / REPORT, page(done, subject))
    write_json(out / SUMMARY, done.said)


def page(done: Sweep, subject: str) -> str:
    """The report."""
    order, said, scored = done.order, done.said, done.scored
    counts, found, space = said["counts"], done.found, done.plan.space
    coordinates = [
        Coordinate(name, [t.params[name] for t in order], s.log, s.low, s.high)
        for name, s in space.items()
    ]
    coordinates.append(Coordinate("residual", [t.residual for t in order], True))
    best = order[0].residual if order else None
    return render_sweep(
        subject=subject, created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        headline="No trial was complete" if best is None
        else f"First-layer residual {best:.3g} at best",
        sentence=f"{len(done.trials)} of {done.plan.trials} trials ended: {counts[COMPLETE]} "
        f"complete, {counts[PRUNED]} stopped early, {counts[FAILED]} failed. Of the candidates of "
        f"{done.pool.runs} runs, {said['pooled']['consensus']} groups are held by several runs.",
        tiles=_tiles(done), coordinates=coordinates if order else (),
        columns=("trial", "residual", "agreement", "expected", *space,
                 *(("recovered",) if scored else ())),
        rows=_rows(done), choice=choice_lines(scored) if scored else (),
        scores=_scores(scored) if scored else (),
        items=_items(done), total=said["pooled"]["consensus"],
        shape=() if found is None else tuple(found.x.shape[1:]),
        knowledge=done.task.knowledge.facts, failures=tuple(said["failures"].items()),
        notes=() if found is None else found.notes,
        settings={k: v for k, v in said["plan"].items() if k != "space"},
        environment=said["environment"],
    )  # fmt: skip


def _tiles(done: Sweep) -> tuple[tuple[str, str], ...]:
    per_hour = 3600 * done.fresh / done.seconds if done.fresh and done.seconds else None
    return (
        ("trials complete", str(len(done.order))),
        ("runs pooled", str(done.pool.runs)),
        ("candidates pooled", str(done.pool.candidates)),
        ("trials per hour", "–" if per_hour is None else f"{per_hour:.0f}"),
    )


def _rows(done: Sweep) -> list[tuple[str, ...]]:
    """Rank and figures of the best trials, and where two objectives compete all of the front."""
    ahead = {trial.number for trial in done.front} if len(done.plan.objectives) > 1 else set()
    shown = done.order[:SHOWN]
    shown += [t for t in done.front[:SHOWN] if t.number in ahead and t not in shown]
    rows = []
    for trial in shown:
        rank = f"{done.order.index(trial) + 1}{' front' if trial.number in ahead else ''}"
        values = (trial.residual, trial.agreement, trial.expected, *trial.params.values())
        cells = [str(trial.number), *("–" if v is None else f"{v:.3g}" for v in values)]
        if done.scored is not None:
            counts = {row["number"]: _count(row) for row in done.scored.rows}
            cells.append(counts.get(trial.number, "–"))
        rows.append((rank, *cells))
    return rows


def choice_lines(scored: Rankings) -> tuple[str, ...]:
    """What the ranking by the weights alone lost, in sentences."""
    said = scored.to_json()
    chosen, best, top = said["chosen"], said["best_with_data"], said["best_of_top"]
    if chosen["recovered"] is None:
        return ("Without a held-out control no count can be told from chance.",)
    rho = said["spearman"]
    return (
        f"Of {scored.n} training samples trial {chosen['number']}, best by the weights alone, recovered "
        f"{_count(chosen)}; trial {best['number']}, best by the data, {_count(best)}. Of the five best "
        f"without the data, trial {top['number']} recovered {_count(top)}.",
        "Rank correlation of a low residual with recovered samples: "
        + ("none, one of them is constant." if rho is None else f"{rho:.2f}."),
        "The data was read after the ranking was fixed and changed nothing in it.",
    )


def _count(row: dict[str, Any]) -> str:
    """Recovered samples of a trial, with what they had to beat."""
    if row["recovered"] is None:
        return "–"
    return f"{row['recovered']} (ncc > {row['threshold']:.3g})"


def _scores(scored: Rankings) -> tuple[Figure, ...]:
    parts = (("all groups", scored.pooled), ("consensus alone", scored.consensus))
    figures = []
    for name, scores in parts:
        if scores is None or scores.metrics["ncc"].recovered is None:
            continue
        part = scores.metrics["ncc"]
        figures.append(
            (
                f"recovered of {scored.n}, {name}",
                f"{part.recovered} ({part.rule}; chance {part.expected_by_chance:.2g}, p {part.p_value:.2g})",
                "one-to-one matches beyond 99% of held-out ones",
            )
        )
    return tuple(figures)


def score_lines(scored: Rankings) -> tuple[str, ...]:
    """The pooled result against chance, in lines."""
    return tuple(f"{name}: {value}" for name, value, _ in _scores(scored))


def _items(done: Sweep) -> list[Item]:
    if done.found is None or done.found.selection is None:
        return []
    chosen, mean = done.found.selection, done.task.knowledge.mean
    agreed = (chosen.support > 1).nonzero().flatten()[:CARDS].tolist()
    items = []
    for place, i in enumerate(agreed):
        items.append(
            Item(
                number=place + 1, found=with_mean(chosen.x[i], mean).numpy(),
                label=f"label {chosen.labels[i].item():g}",
                confidence=float(chosen.confidence[i]), support=int(chosen.support[i]),
                restarts=done.pool.runs,
            )
        )  # fmt: skip
    return items
