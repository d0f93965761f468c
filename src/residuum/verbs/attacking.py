"""The folder of an attack: how it is written and continued, and the scores that are added to it.

``attack.json`` is written last and marks a run as complete. ``attack_state.safetensors`` exists as long
as the run can be continued.
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
    """The open folder of an attack."""

    what, files, summary = "an attack", (SUMMARY, STATE, RECONSTRUCTION), SUMMARY

    def finished(self, request: dict[str, Any], knowledge: Knowledge) -> Reconstruction | None:
        """Return the complete run in this folder.

        Args:
            request: The request of this attack.
            knowledge: What the attacker knows.

        Returns:
            The result, or None if the run is unfinished. A folder with another attack is an
            ``InputError``.
        """
        if not self.is_complete:
            return None
        result = load_run(self.path)
        if read_request(self.path) != request or not same(result.knowledge, knowledge):
            rundir.refuse_other_run(self.path, self.what, "settings or weights")
        return None if "time" in result.status and (self.path / STATE).is_file() else result

    def attack(
        self,
        released: Network,
        knowledge: Knowledge,
        attack: Attack,
        request: dict[str, Any],
        preset: str,
        watch: Watcher | None = None,
    ) -> Reconstruction:
        """Run the attack and write its files, the summary last.

        If the attack stopped because its time was over, its state is kept so that it can be continued.

        Args:
            released: The released network.
            knowledge: What the attacker knows.
            attack: The attack.
            request: The request, to recognize this run later.
            preset: Name of the preset.
            watch: Receives the progress of the attack.

        Returns:
            The result.
        """
        state, out = self.path / STATE, self.path
        result = attack.run(released, knowledge, state_path=state, watch=watch)
        result.save(out / RECONSTRUCTION)
        pictures = {
            "selected.png": figures.selected_figure(result),
            "loss.png": figures.loss_figure(result),
            "family.png": figures.family_figure(result),
        }
        write_figures(out, pictures)
        summary = {
            **result.to_json(),
            "preset": preset,
            "request": request,
            "sha256": {RECONSTRUCTION: sha256(out / RECONSTRUCTION)},
            "environment": rundir.environment(result.settings["device"]),
        }
        write_json(out / SUMMARY, summary)
        if "time" not in result.status:
            state.unlink(missing_ok=True)
        return result


def make_request(release: Release, released: Network, attack: Attack) -> dict[str, Any]:
    """Return the request of an attack. Two attacks with the same request are the same.

    Args:
        release: The released file.
        released: The network in it.
        attack: The attack. Its time limit is not a part of the request.

    Returns:
        Settings, architecture and hash of the file.
    """
    settings = {name: value for name, value in attack.to_json().items() if name != "seconds"}
    return {"settings": settings, "arch": released.arch, "checkpoint_sha256": release.sha256}


def load_run(out: Path) -> Reconstruction:
    """Return the reconstruction in the folder of an attack.

    Args:
        out: The folder.

    Returns:
        The reconstruction.

    Raises:
        InputError: If the folder holds none.
    """
    if not (out / RECONSTRUCTION).is_file():
        raise InputError(
            f"An attack's folder must hold {RECONSTRUCTION}; {str(out)!r} does not.",
            "Write one with residuum attack CKPT --out RUN.",
        )
    return Reconstruction.load(out / RECONSTRUCTION)


def read_request(out: Path) -> dict[str, Any]:
    """Return the request in the folder of an attack, empty if the folder does not hold it."""
    request = read_json(out / SUMMARY).get("request")
    return request if isinstance(request, dict) else {}


def attacked_other(checkpoint: Path, out: Path) -> bool:
    """Return True if the folder is known to hold an attack on another checkpoint.

    Args:
        checkpoint: The checkpoint.
        out: Folder of an attack.

    Returns:
        Whether the hashes differ. False if the folder does not name its checkpoint.
    """
    attacked = read_request(out).get("checkpoint_sha256")
    return attacked is not None and attacked != sha256(locate_weights(checkpoint))


def score_run(
    run: Path,
    train: Dataset,
    holdout: Dataset | None,
    checkpoint: Path | None,
    candidates: str,
    **options: Any,
) -> tuple[dict[str, Any], Scores, Scores | None, Reconstruction]:
    """Score the reconstruction in the folder of an attack. Write ``scores.json`` and figures to it.

    Args:
        run: Folder of the attack.
        train: Training samples.
        holdout: Held-out samples, if any.
        checkpoint: The attacked checkpoint, if given. It adds margins.
        candidates: "all", or "selected" for the candidates that the attack selected. With "all" the
            selected candidates are scored separately too.
        **options: Arguments of :func:`residuum.score`.

    Returns:
        The summary that was written, the scores, the scores of the selected candidates if they were
        scored separately, and the reconstruction.
    """
    require_known(candidates, CANDIDATES, "No candidates")
    result, outputs, is_other = load_run(run), None, False
    if checkpoint is not None:
        model = load_checkpoint(checkpoint, read_request(run).get("arch")).module
        outputs = evaluate(model, train.x.to(next(model.parameters()).dtype)).detach()
        is_other = attacked_other(checkpoint, run)

    def score_pool(pool: CandidatePool) -> Scores:
        return score(pool.x, train, holdout, multipliers=pool.lam, outputs=outputs, **options)

    chosen = selected_candidates(result)
    pool = all_candidates(result) if candidates == "all" else chosen
    scores = score_pool(pool)
    if is_other:
        scores = scores.replace(notes=(*scores.notes, OTHER))
    is_separate = candidates == "all" and len(chosen.x) > 0
    selected = score_pool(chosen) if is_separate else None
    summary = {
        **scores.to_json(),
        "candidates": candidates,
        "selected": None if selected is None else selected.to_json(),
        "attack": result.attack,
        "status": list(result.status),
        "knowledge": dict(result.knowledge.provenance),
    }
    write_json(run / SCORES, summary)
    pictures = {"matches.png": figures.matches_figure(pool.x, train, scores)}
    if outputs is not None:
        metrics = ("l2",) if train.shape == (2,) else ("ncc", "ssim3")
        pictures["output_score.png"] = figures.output_figure(scores, outputs, metrics)
    write_figures(run, pictures)
    return summary, scores, selected, result


def write_figures(out: Path, pictures: dict[str, bytes | None]) -> None:
    """Write pictures to a folder.

    Args:
        out: The folder.
        pictures: PNG by file name. A picture that could not be drawn is None and is left out.
    """
    for name, figure in pictures.items():
        if figure is not None:
            write_atomic(out / name, figure)
