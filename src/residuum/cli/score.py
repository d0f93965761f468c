"""``residuum score``: what came back of the training set, against what chance brings back.

Examples:

residuum score runs/a --data train.npz --holdout test.npz

residuum score runs/a --data runs/m --holdout runs/m --ckpt runs/m --json
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from residuum.cli.options import Voice, option
from residuum.cli.output import number, print_line, print_notes, print_table

if TYPE_CHECKING:
    from torch import Tensor

    from residuum.evaluation.scoring import CandidatePool
    from residuum.records import Dataset, Reconstruction, Scores

CANDIDATES = ("all", "selected")


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of an attack.")],
    *,
    data: Path = option("Training samples: an .npz with x and y, or a training directory.", ...),
    holdout: Path | None = option("Samples the network never saw, likewise; at least 100."),
    ckpt: Path | None = option("The attacked checkpoint: adds margins."),
    candidates: str = option(
        "all: every candidate and consensus; selected: those held by several restarts.", "all"
    ),
    metrics: str | None = option("Of ncc, ssim3, ssim, l2, psnr, between commas."),
    subsets: int = option("Held-out subsets drawn.", 500),
    seed: int = option("Seed of those draws.", 0, min=0),
    voice: Voice,
) -> None:
    """Count recovered training samples, published and calibrated against held-out ones."""
    from residuum.errors import InputError, did_you_mean
    from residuum.evaluation import score
    from residuum.evaluation.scoring import selected_pool, whole_pool
    from residuum.verbs.attacking import load_run, write_scores

    if candidates not in CANDIDATES:
        raise InputError(f"No candidates {candidates!r}.", did_you_mean(candidates, CANDIDATES))
    _refuse_audit(run)
    found = load_run(run)
    train = read_samples(data, "train.npz")
    control = None if holdout is None else read_samples(holdout, "holdout.npz")
    outputs, notes = _network(ckpt, train, run)

    def judge(pool: CandidatePool) -> Scores:
        return score(
            pool[0], train, control, candidate_labels=pool[1], multipliers=pool[2],
            outputs=outputs, seed=seed, subsets=subsets,
            metrics=None if metrics is None else [name.strip() for name in metrics.split(",")],
        )  # fmt: skip

    chosen = selected_pool(found)
    pool = whole_pool(found) if candidates == "all" else chosen
    scores = judge(pool)
    scores = scores.replace(notes=(*scores.notes, *notes))
    selected = judge(chosen) if candidates == "all" and len(chosen[0]) else None
    summary = write_scores(run, found, scores, selected, candidates, pool[0], train, outputs)
    voice.answer(summary, lambda: show(scores, selected, found, run))


def _refuse_audit(run: Path) -> None:
    """An audit's files stay as it wrote them: ``result.json`` holds their hashes."""
    from residuum.auditing.artifacts import RESULT, WORK
    from residuum.errors import InputError

    if (run / RESULT).is_file() or (run / WORK).is_dir():
        raise InputError(
            f"{str(run)!r} is the folder of an audit, which has scores of its own (scores.json).",
            "Name the folder of an attack; for other data audit again with another --out.",
        )


def show(scores: Scores, selected: Scores | None, found: Reconstruction, run: Path) -> None:
    """The scores as a person reads them."""
    _table(f"{scores.n} training samples, {scores.m} candidates of {found.attack}", scores)
    if selected is not None:
        _table(f"of these the {selected.m} that the attack itself selected", selected)
    print_line(
        scores.reason
        or f"* decides; threshold: the 99th percentile of chance, by {scores.pool} held-out samples"
    )
    print_line(f"granted to the attacker: {found.knowledge.line}")
    print_notes(scores.notes)
    print_line(f"written to {run}")


def _table(title: str, scores: Scores) -> None:
    rows = []
    for name, part in scores.metrics.items():
        published = "-"
        if part.published_threshold is not None:
            sign = ">" if part.higher_is_better else "<"
            counts = (part.above_published_threshold, part.above_published_threshold_holdout)
            published = f"{sign} {part.published_threshold:g}: {' / '.join(map(number, counts))}"
        rows.append((
            f"{name} *" if name == scores.deciding else name,
            "not calibrated" if part.recovered is None else f"{part.recovered}/{scores.n}",
            number(part.expected_by_chance, 3), number(part.p_value, 3),
            part.threshold, published, number(part.top10_mean, 3),
        ))  # fmt: skip
    columns = (
        "metric", "recovered", "chance", "p", "threshold", "published:\ntrain/held-out", "top 10",
    )  # fmt: skip
    print_table(title, columns, rows)


def read_samples(path: Path, name: str) -> Dataset:
    """Samples of an .npz, or of ``private/name`` in a training directory."""
    from residuum.records import Dataset
    from residuum.records.data import samples_file

    return Dataset.from_npz(samples_file(path, name))


def _network(ckpt: Path | None, train: Dataset, run: Path) -> tuple[Tensor | None, tuple[str, ...]]:
    """What the network says of the samples, and a note if it is another one."""
    from residuum.checkpoints import build_model, load_checkpoint
    from residuum.theory.kkt import evaluate
    from residuum.verbs.attacking import asked_for, attacked_other

    if ckpt is None:
        return None, ()
    released = load_checkpoint(ckpt, asked_for(run).get("arch"))
    other = attacked_other(ckpt, run)
    notes = ("--ckpt is not the checkpoint that was attacked",) if other else ()
    model = build_model(released)
    outputs = evaluate(model, train.x.to(next(model.parameters()).dtype))
    return outputs.detach(), notes
