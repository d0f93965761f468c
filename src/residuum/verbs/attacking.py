"""The folder of an attack: how the folder is written, how an attack is continued, and how it is scored.

The file ``attack.json`` is written last and marks an attack as complete. ``attack_state.safetensors`` exists
as long as the attack can be continued.
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
from residuum.io.release import Release, open_release
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, Reconstruction, Scores, rundir, same
from residuum.records.rundir import RunDir, read_json, sha256, write_atomic, write_json
from residuum.report import figures
from residuum.theory.kkt import evaluate

SUMMARY, STATE = "attack.json", "attack_state.safetensors"
CANDIDATES = ("all", "selected")
OTHER = "the checkpoint passed as --ckpt is not the checkpoint that was attacked"
RECONSTRUCTION, SCORES = "reconstruction.safetensors", "scores.json"


class AttackRun(RunDir):
    """The folder of an attack, opened for writing."""

    what, files, summary = "an attack", (SUMMARY, STATE, RECONSTRUCTION), SUMMARY

    def finished(self, request: dict[str, Any], knowledge: Knowledge) -> Reconstruction | None:
        """Return the result of the attack in this folder, if the attack is complete.

        An ``InputError`` is raised if the folder holds an attack with other settings or weights.

        Args:
            request: Settings, architecture and hash of the weights, which identify the attack.
            knowledge: What the attacker knows.

        Returns:
            The reconstruction, or None if the attack is unfinished.
        """
        if not self.is_complete:
            return None
        reconstruction = load_run(self.path)
        if read_request(self.path) != request or not same(reconstruction.knowledge, knowledge):
            rundir.refuse_other_run(self.path, self.what, "settings or weights")
        return (
            None
            if "time" in reconstruction.status and (self.path / STATE).is_file()
            else reconstruction
        )

    def attack(
        self,
        released: Network,
        knowledge: Knowledge,
        attack: Attack,
        request: dict[str, Any],
        preset: str,
        watch: Watcher | None = None,
    ) -> Reconstruction:
        """Run the attack and write its files to this folder, the summary last.

        If the attack stopped at its time limit, the state of the attack is kept, so that the attack can be
        continued.

        Args:
            released: The released network.
            knowledge: What the attacker knows.
            attack: The attack with its settings.
            request: Settings, architecture and hash of the weights, which identify the attack.
            preset: Name of the preset that the settings of the attack come from.
            watch: Function that receives the progress of the attack.

        Returns:
            The reconstruction.
        """
        state, out = self.path / STATE, self.path
        reconstruction = attack.run(released, knowledge, state_path=state, watch=watch)
        reconstruction.save(out / RECONSTRUCTION)
        pictures = {
            "selected.png": figures.selected_figure(reconstruction),
            "loss.png": figures.loss_figure(reconstruction),
            "family.png": figures.family_figure(reconstruction),
        }
        write_figures(out, pictures)
        attack_summary = {
            **reconstruction.to_json(),
            "preset": preset,
            "request": request,
            "sha256": {RECONSTRUCTION: sha256(out / RECONSTRUCTION)},
            "environment": rundir.environment(reconstruction.settings["device"]),
        }
        write_json(out / SUMMARY, attack_summary)
        if "time" not in reconstruction.status:
            state.unlink(missing_ok=True)
        return reconstruction


def make_request(release: Release, released: Network, attack: Attack) -> dict[str, Any]:
    """Collect the values that identify an attack, which are stored in its folder.

    Args:
        release: The released file.
        released: The network in the released file.
        attack: The attack. Its time limit does not identify the attack.

    Returns:
        The settings of the attack, the architecture of the network and the hash of the file.
    """
    settings = {name: value for name, value in attack.to_json().items() if name != "seconds"}
    return {"settings": settings, "arch": released.arch, "checkpoint_sha256": release.sha256}


def load_run(out: Path) -> Reconstruction:
    """Return the reconstruction in the folder of an attack.

    Args:
        out: Folder of an attack.

    Returns:
        The reconstruction.

    Raises:
        InputError: If the folder holds no reconstruction.
    """
    if not (out / RECONSTRUCTION).is_file():
        raise InputError(
            f"The folder of an attack must hold the file {RECONSTRUCTION}; the folder {str(out)!r} does "
            f"not.",
            "To create such a folder, run: residuum attack CKPT --out RUN.",
        )
    return Reconstruction.load(out / RECONSTRUCTION)


def read_request(out: Path) -> dict[str, Any]:
    """Read the values that identify the attack in a folder. Return {} if the folder holds no attack."""
    request = read_json(out / SUMMARY).get("request")
    return request if isinstance(request, dict) else {}


def attacked_other(checkpoint: Path, out: Path) -> bool:
    """Return True if the folder is known to hold an attack on another checkpoint.

    Args:
        checkpoint: Path of the checkpoint.
        out: Folder of an attack.

    Returns:
        True if the folder holds the hash of another checkpoint, False if it holds the same hash or no hash.
    """
    attacked_sha256 = read_request(out).get("checkpoint_sha256")
    return attacked_sha256 is not None and attacked_sha256 != open_release(checkpoint).sha256


def score_run(
    run: Path,
    train: Dataset,
    holdout: Dataset | None,
    checkpoint: Path | None,
    candidates: str,
    **options: Any,
) -> tuple[dict[str, Any], Scores, Scores | None, Reconstruction]:
    """Score the reconstruction in the folder of an attack. Write ``scores.json`` and pictures to the folder.

    Args:
        run: Folder of the attack.
        train: Training samples.
        holdout: Held-out samples, None if there are none.
        checkpoint: The attacked checkpoint, which adds the margins of the samples to the scores, or None.
        candidates: "all", or "selected" for the candidates that the attack selected. With "all", the
            selected candidates are also scored separately.
        **options: Arguments of :func:`residuum.score`.

    Returns:
        The content of ``scores.json``, the scores, the scores of the selected candidates (None if they
        were not scored separately), and the reconstruction.
    """
    require_known(candidates, CANDIDATES, "There is no choice of candidates")
    result, outputs, is_other_checkpoint = load_run(run), None, False
    if checkpoint is not None:
        model = load_checkpoint(checkpoint, read_request(run).get("arch")).module
        outputs = evaluate(model, train.x.to(next(model.parameters()).dtype)).detach()
        is_other_checkpoint = attacked_other(checkpoint, run)

    def score_pool(pool: CandidatePool) -> Scores:
        return score(pool.x, train, holdout, multipliers=pool.lam, outputs=outputs, **options)

    selected_set = selected_candidates(result)
    scored_set = all_candidates(result) if candidates == "all" else selected_set
    scores = score_pool(scored_set)
    if is_other_checkpoint:
        scores = scores.replace(notes=(*scores.notes, OTHER))
    has_separate_scores = candidates == "all" and len(selected_set.x) > 0
    selected_scores = score_pool(selected_set) if has_separate_scores else None
    score_summary = {
        **scores.to_json(),
        "candidates": candidates,
        "selected": None if selected_scores is None else selected_scores.to_json(),
        "attack": result.attack,
        "status": list(result.status),
        "knowledge": dict(result.knowledge.provenance),
    }
    write_json(run / SCORES, score_summary)
    pictures = {"matches.png": figures.matches_figure(scored_set.x, train, scores)}
    if outputs is not None:
        metric_names = ("l2",) if train.shape == (2,) else ("ncc", "ssim3")
        pictures["output_score.png"] = figures.output_figure(scores, outputs, metric_names)
    write_figures(run, pictures)
    return score_summary, scores, selected_scores, result


def write_figures(out: Path, pictures: dict[str, bytes | None]) -> None:
    """Write pictures to a folder.

    Args:
        out: The folder.
        pictures: Content of each PNG file by its name. None for a picture that could not be drawn.
    """
    for name, figure in pictures.items():
        if figure is not None:
            write_atomic(out / name, figure)
