"""The directory of an attack: written atomically, taken up again, and what a score adds to it.

``attack.json`` is written last and marks a run as complete; ``attack_state.safetensors`` is there
while one can be continued.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from residuum.attacks import Attack
from residuum.attacks.base import Watcher
from residuum.errors import InputError, require_known
from residuum.evaluation import score
from residuum.evaluation.scoring import CandidatePool, all_candidates, selected_candidates
from residuum.io.checkpoints import load_checkpoint
from residuum.io.release import Release, locate_weights
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, Reconstruction, Scores, rundir, same
from residuum.records.rundir import RunDir, read_json, sha256, write_atomic, write_json
from residuum.report import figures
from residuum.theory.kkt import evaluate

SUMMARY, STATE = "attack.json", "attack_state.safetensors"
CANDIDATES = ("all", "selected")
OTHER = "--ckpt is not the checkpoint that was attacked"
RECONSTRUCTION, SCORES = "reconstruction.safetensors", "scores.json"


class AttackRun(RunDir):
    """An open directory of an attack."""

    what, files, summary = "an attack", (SUMMARY, STATE, RECONSTRUCTION), SUMMARY

    def finished(self, request: dict[str, Any], knowledge: Knowledge) -> Reconstruction | None:
        """The complete run in this folder, None when work is left; another attack is refused."""
        if not self.is_complete:
            return None
        found = load_run(self.path)
        if asked_for(self.path) != request or not same(found.knowledge, knowledge):
            rundir.refuse_other_run(self.path, self.what, "settings or weights")
        return None if "time" in found.status and (self.path / STATE).is_file() else found

    def attack(
        self,
        released: Network,
        knowledge: Knowledge,
        attack: Attack,
        request: dict[str, Any],
        preset: str,
        watch: Watcher | None = None,
    ) -> Reconstruction:
        """Attack, and write everything, the summary last; the state stays where time ran out."""
        state, out = self.path / STATE, self.path
        found = attack.run(released, knowledge, state_path=state, watch=watch)
        found.save(out / RECONSTRUCTION)
        drawn = {"selected.png": figures.selected_figure(found)}
        drawn |= {
            "loss.png": figures.loss_figure(found),
            "family.png": figures.family_figure(found),
        }
        write_figures(out, drawn)
        made = {"preset": preset, "request": request}
        made |= {"sha256": {RECONSTRUCTION: sha256(out / RECONSTRUCTION)}}
        made |= {"environment": rundir.environment(found.settings["device"])}
        write_json(out / SUMMARY, {**found.to_json(), **made})
        if "time" not in found.status:
            state.unlink(missing_ok=True)
        return found


def request_of(release: Release, released: Network, attack: Attack) -> dict[str, Any]:
    """All that was asked for, but the wall clock: what decides whether two attacks are the same."""
    settings = {name: value for name, value in attack.to_json().items() if name != "seconds"}
    return {"settings": settings, "arch": released.arch, "checkpoint_sha256": release.sha256}


def load_run(out: Path) -> Reconstruction:
    """The reconstruction in an attack's folder."""
    if not (out / RECONSTRUCTION).is_file():
        raise InputError(
            f"An attack's folder must hold {RECONSTRUCTION}; {str(out)!r} does not.",
            "Write one with residuum attack CKPT --out RUN.",
        )
    return Reconstruction.load(out / RECONSTRUCTION)


def asked_for(out: Path) -> dict[str, Any]:
    """What an attack's folder says was asked for; empty where it does not say."""
    request = read_json(out / SUMMARY).get("request")
    return request if isinstance(request, dict) else {}


def attacked_other(checkpoint: Path, out: Path) -> bool:
    """Whether the folder is known to be of an attack on another checkpoint."""
    attacked = asked_for(out).get("checkpoint_sha256")  # unknown where there is no attack.json
    return attacked is not None and attacked != sha256(locate_weights(checkpoint))


def score_run(
    run: Path, train: Dataset, control: Dataset | None, ckpt: Path | None, which: str, **how: Any
) -> tuple[dict[str, Any], Scores, Scores | None, Reconstruction]:
    """What came back in an attack's folder, against chance: ``scores.json`` and figures in it.

    ckpt: the attacked checkpoint, adds margins.
    which: "all" or "selected", the attack's own choice, whose scores stand beside those of all.
    how: arguments of :func:`residuum.score`.
    """
    require_known(which, CANDIDATES, "No candidates")
    found, outputs, other = load_run(run), None, False
    if ckpt is not None:
        model = load_checkpoint(ckpt, asked_for(run).get("arch")).module
        outputs = evaluate(model, train.x.to(next(model.parameters()).dtype)).detach()
        other = attacked_other(ckpt, run)

    def judge(pool: CandidatePool) -> Scores:
        return score(pool.x, train, control, multipliers=pool.lam, outputs=outputs, **how)

    chosen = selected_candidates(found)
    pool = all_candidates(found) if which == "all" else chosen
    scores = judge(pool)
    if other:
        scores = scores.replace(notes=(*scores.notes, OTHER))
    selected = judge(chosen) if which == "all" and len(chosen.x) else None
    summary = {
        **scores.to_json(),
        "candidates": which,
        "selected": None if selected is None else selected.to_json(),
        "attack": found.attack,
        "status": list(found.status),
        "knowledge": dict(found.knowledge.provenance),
    }
    write_json(run / SCORES, summary)
    drawn = {"matches.png": figures.matches_figure(pool.x, train, scores)}
    if outputs is not None:
        wanted = ("l2",) if train.shape == (2,) else ("ncc", "ssim3")
        drawn["output_score.png"] = figures.output_figure(scores, outputs, wanted)
    write_figures(run, drawn)
    return summary, scores, selected, found


def write_figures(out: Path, drawn: dict[str, bytes | None]) -> None:
    """Every picture that could be drawn."""
    for name, figure in drawn.items():
        if figure is not None:
            write_atomic(out / name, figure)
