"""``residuum certify CKPT --reconstruction RUN``: what equal pairs keep of what came back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from residuum.cli.granted import describe
from residuum.cli.output import certificate_progress, number, print_json, print_line, print_table
from residuum.cli.paths import weights_hash
from residuum.cli.runs import load_run, read_summary

if TYPE_CHECKING:
    from residuum.records import Checkpoint, Reconstruction
    from residuum.records.uniqueness import Uniqueness
    from residuum.theory.uniqueness.reconstruction import Candidates

ROWS = 30


def certify_reconstruction(
    checkpoint: Path, released: Checkpoint, run: Path, *, task: str, which: str, samples: int | None,
    tolerance: float, device: str, out: Path | None, json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Cost first, then the certificate; the table, or JSON, and the files."""
    from residuum.attacks import OBJECTIVES
    from residuum.checkpoints import build_model
    from residuum.theory.uniqueness import question

    found = load_run(run)
    if task == "auto" and found.attack in OBJECTIVES:
        task = OBJECTIVES[found.attack].task or task
    asked = question(build_model(released).double(), found, which, task)
    cost = asked.cost(samples, device)
    if not (json or quiet):
        print_line(f"cost: {cost}")
    with certificate_progress(not (json or quiet)) as watch:
        unique = asked.answer(tolerance, samples, device=device, watch=watch)
    notes = _other_checkpoint(checkpoint, run)
    unique = unique.replace(notes=(*unique.notes, *notes))
    summary = _summary(unique, asked.candidates, found, which, cost.seconds)
    if out is not None:
        _write(out, unique, summary, asked.candidates, found)
    if json:
        print_json(summary)
    elif not quiet:
        show(unique, asked.candidates, found, f"{released.arch}, {len(unique)} of {which}: {run}")
        if out is not None:
            print_line(f"written to {out}")


def show(unique: Uniqueness, chosen: Candidates, found: Reconstruction, title: str) -> None:
    """Restart agreement and certificate side by side."""
    columns = (
        "#", "label", "restarts", "conf.", "pairs keep", "at least", "radius", "/ size", "stopped by",
    )  # fmt: skip
    rows = []
    for k, row in enumerate(unique.to_json()["per_sample"][:ROWS]):
        bounded = not row["unbounded"] and row["size"]
        rows.append(
            (
                str(k), f"{row['label']:g}", *_agreement(chosen, row["index"]),
                number(row["determined_energy"], 3), number(row["determined_at_least"], 3),
                "free" if row["unbounded"] else number(row["radius"], 3),
                number(row["radius"] / row["size"], 3) if bounded else "-", row["blocked_by"],
            )
        )  # fmt: skip
    print_table(title, columns, rows)
    if len(unique) > ROWS:
        print_line(f"and {len(unique) - ROWS} more in the JSON")
    space = unique.null_space
    undoubled = _span(space.undoubled, space.undoubled_most)
    print_line(
        f"null space: {undoubled} dimensions as they are, "
        f"{_span(space.doubled, space.doubled_most)} with every candidate doubled: {space.twins} move "
        f"multiplier between equal copies, {space.pairs_inside} are opposite moves inside row(W1), "
        f"{space.pairs_outside} outside; {space.patterns} patterns for {unique.samples} candidates"
    )
    print_line(
        f"radius: both halves of a candidate move that far, one each way, before the residual changes "
        f"by {unique.tolerance:g} of the layers' norms; pairs keep: least energy of an image of such "
        "an equal pair over that of this one, as attained; at least: a lower bound of it, for pairs"
    )
    print_line("not covered, and may keep less: unequal splits, exchanges between candidates")
    print_line(f"granted to the attacker: {describe(found.knowledge)}")
    for note in unique.notes:
        print_line(f"note: {note}")


def _agreement(chosen: Candidates, i: int) -> tuple[str, str]:
    if chosen.support is None or chosen.confidence is None:
        return "-", "-"
    return f"{int(chosen.support[i])}/{chosen.restarts}", number(float(chosen.confidence[i]), 2)


def _span(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


def _summary(
    unique: Uniqueness, chosen: Candidates, found: Reconstruction, which: str, estimated: float
) -> dict[str, Any]:
    """The published form, with what the restarts say of each."""
    summary = unique.to_json()
    for row in summary["per_sample"]:
        i = row["index"]
        known = chosen.support is not None and chosen.confidence is not None
        row["support"] = int(chosen.support[i]) if known else None  # type: ignore[index]
        row["confidence"] = float(chosen.confidence[i]) if known else None  # type: ignore[index]
    return {
        **summary,
        "candidates": which,
        "restarts": found.restarts,
        "estimated_seconds": estimated,
        "attack": found.attack,
        "knowledge": dict(found.knowledge.provenance),
    }


def _write(
    out: Path,
    unique: Uniqueness,
    summary: dict[str, Any],
    chosen: Candidates,
    found: Reconstruction,
) -> None:
    from residuum.records import write_atomic, write_json
    from residuum.report.ambiguity import ambiguity_figure

    unique.save(out / "uniqueness.safetensors")
    support = chosen.support
    agreement = None if support is None else [f"{int(s)}/{chosen.restarts}" for s in support]
    figure = ambiguity_figure(chosen.x, unique, found.knowledge.mean, agreement)
    if figure is not None:
        write_atomic(out / "ambiguity.png", figure)
    write_json(out / "uniqueness.json", summary)


def _other_checkpoint(checkpoint: Path, run: Path) -> tuple[str, ...]:
    """A note where the network is not the one that was attacked."""
    request = read_summary(run).get("request")
    attacked = request.get("checkpoint_sha256") if isinstance(request, dict) else None
    same = attacked is None or attacked == weights_hash(checkpoint)
    return () if same else ("CKPT is not the checkpoint that was attacked",)
