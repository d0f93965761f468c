"""``residuum demo``: train networks on bundled data, attack them and audit them.

The demo audits two networks with the same settings. One network was trained on images of digits. The other
network was never trained, so nothing can be found in it. Then the demo reconstructs color photographs from
the first layer of a third network in about two seconds. The attack unmix separates the rows of this layer.

Examples:
residuum demo

residuum demo --out pictures --json
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from residuum.cli import options
from residuum.cli.output import (
    attack_progress,
    format_number,
    print_line,
    print_table,
    training_progress,
)

if TYPE_CHECKING:
    from residuum.attacks.base import AttackProgress
    from residuum.auditing.result import AuditResult
    from residuum.networks.network import Network
    from residuum.records import Split

# The network trained on digits: its architecture, number of training samples, and number of training steps.
ARCH, SAMPLES, STEPS = "mlp:64-200-200-1", 20, 5000
RESTARTS, ATTACK_STEPS = 4, 2000
PICTURE = "reconstructions.png"
# The network trained on photographs: architecture, numbers of samples and of training steps, and the time
# limit of the attack in seconds.
PHOTO_ARCH, PHOTOS, PHOTO_STEPS, PHOTO_SECONDS = "mlp:3072-300-300-1", 40, 600, 2.0
PHOTO_PICTURE = "photos.png"
CERTIFICATE_ROWS = {
    "KKT residual, plain": "residual_plain",
    "KKT residual, Clarke": "residual_clarke",
    "margin": "margin",
}
# The demo runs two audits. For each: the name of its folder, and the name of the folder with the weights.
NETWORKS = {"trained": "network", "untrained": "untrained-network"}


app = options.command_app("demo", __doc__)


@app.default
def _command(
    *,
    out: Annotated[
        Path,
        Parameter(
            help="Folder for the results of the demo: the audits, the pictures and the file "
            "demo.json.",
            show_default=True,
        ),
    ] = Path("runs/demo"),
    output: options.Output = options.OUTPUT,
) -> None:
    """Train a network on bundled digits, audit it and an untrained network, and write reports."""
    from residuum.auditing.result import AuditResult
    from residuum.datasets import load_dataset
    from residuum.records import make_directory, write_atomic
    from residuum.records.rundir import use_one_thread

    make_directory(out)  # fail before the work starts if the folder cannot be written
    write_atomic(out / ".gitignore", "*\n")
    split = load_dataset("digits", SAMPLES)
    with use_one_thread():
        trained_network = _write_networks(out, split, output.visible)
        for name in NETWORKS:
            with attack_progress(output.visible) as watch:
                _audit(out, name, watch)
        photo_results = _unmix_photos(out, output.visible)
    result_of_audit = {audit: AuditResult.load(out / audit) for audit in NETWORKS}
    demo_summary = _write_summary(out, split, trained_network, result_of_audit, photo_results)
    output.print_result(demo_summary, lambda: _show(result_of_audit, demo_summary))
    _check_verdicts(result_of_audit)
    if output.visible:
        print_line(f"report: {out / 'trained' / 'report.html'}")


def _write_networks(out: Path, split: Split, visible: bool) -> Network:
    """Write a trained and an untrained network of the same architecture. Return the trained network."""
    from residuum.io.checkpoints import save_checkpoint
    from residuum.networks import Architecture
    from residuum.stationarity import parameters
    from residuum.training import TrainingConfig, initialize, make_release, train
    from residuum.training.directory import write_run

    config = TrainingConfig(steps=STEPS)
    with training_progress(visible) as watch:
        training_state = train(ARCH, split.train, config, watch=watch)
    (out / "network" / "private").mkdir(parents=True, exist_ok=True)
    write_run(out / "network", ARCH, split, config, training_state, "binary", "cpu")
    trained_network = make_release(training_state, ARCH, split.train, "binary")
    untrained_model = initialize(Architecture.parse(ARCH), TrainingConfig(init="default"))
    untrained_file = out / NETWORKS["untrained"] / "model.safetensors"
    save_checkpoint(trained_network.replace(theta=parameters(untrained_model)), untrained_file)
    return trained_network


def _unmix_photos(out: Path, visible: bool) -> dict[str, Any]:
    """Reconstruct photographs from the first layers of a trained and an untrained network, and score them."""
    from residuum.attacks import Unmix
    from residuum.attacks.unmixing.attack import LADDER
    from residuum.attacks.unmixing.ica import unmix
    from residuum.datasets import load_dataset
    from residuum.evaluation import score
    from residuum.io.checkpoints import save_checkpoint
    from residuum.networks import Architecture
    from residuum.networks.network import first_layer
    from residuum.records import Knowledge, write_atomic
    from residuum.report.figures import compared_figure
    from residuum.stationarity import parameters
    from residuum.training import TrainingConfig, initialize, make_release, train

    split = load_dataset("photos", PHOTOS, seed=0)
    config = TrainingConfig(steps=PHOTO_STEPS, dtype="float32")
    with training_progress(visible) as watch:
        training_state = train(PHOTO_ARCH, split.train, config, watch=watch)
    trained_network = make_release(training_state, PHOTO_ARCH, split.train, "binary")
    save_checkpoint(trained_network, out / "photos-network" / "model.safetensors")
    mean, shape = split.train.mean, split.train.shape
    knowledge = Knowledge(shape, value_range=(0, 1), mean=mean, provenance={"mean": "train"})
    reconstruction = Unmix(seconds=PHOTO_SECONDS).run(trained_network, knowledge)
    # The class Unmix raises an error for an untrained layer, whose weights look like noise. The function
    # unmix does not. Its argument ``rank`` is the number of images to recover.
    untrained_model = initialize(Architecture.parse(PHOTO_ARCH), TrainingConfig(init="default"))
    untrained_layer = first_layer(parameters(untrained_model)).float()
    untrained_images = unmix(
        untrained_layer, split.train.shape, LADDER[0], rank=len(reconstruction.x)
    )
    untrained_candidates = untrained_images.x.reshape(-1, *split.train.shape)
    candidates_and_scores = {}
    for title, x in (("trained", reconstruction.x), ("never trained", untrained_candidates)):
        candidates_and_scores[title] = (x, score(x, split.train, split.holdout, metrics=["ncc"]))
    if figure := compared_figure(candidates_and_scores, split.train):
        write_atomic(out / PHOTO_PICTURE, figure)
    score_fields = ("recovered", "n", "rule", "expected_by_chance", "p_value")
    score_summaries = [
        {name: getattr(scores, name) for name in score_fields}
        for _, scores in candidates_and_scores.values()
    ]
    return {
        "arch": PHOTO_ARCH,
        "picture": str(out / PHOTO_PICTURE),
        "seconds": reconstruction.seconds,
        "trained": score_summaries[0],
        "untrained": score_summaries[1],
        "notes": list(reconstruction.notes),
    }


def _audit(out: Path, name: str, watch: Callable[[AttackProgress], None] | None) -> None:
    """Audit a network with fixed settings, so that the results are reproducible."""
    from residuum.auditing.listener import AuditListener
    from residuum.auditing.run import audit

    class ProgressBar(AuditListener):
        def watch_attack(self, *_: Any) -> Callable[[AttackProgress], None] | None:
            return watch

    audit(
        out / NETWORKS[name] / "model.safetensors",
        data=out / "network",
        holdout=out / "network",
        knowledge={"value_range": (0, 1), "mean": "train", "sample_count": SAMPLES},
        attacks=[{"attack": "binary-kkt", "restarts": RESTARTS, "steps": ATTACK_STEPS}],
        out=out / name,
        listener=ProgressBar(),
    )


def _write_summary(
    out: Path,
    split: Split,
    trained_network: Network,
    results: dict[str, AuditResult],
    photo_results: dict[str, Any],
) -> dict[str, Any]:
    """Write ``demo.json`` and a picture of the reconstructed digits. Return the content of ``demo.json``."""
    from residuum.auditing.artifacts import read_result
    from residuum.evaluation.scoring import all_candidates
    from residuum.records import write_atomic, write_json
    from residuum.report.figures import compared_figure
    from residuum.theory import certify

    holdout = split.holdout
    certificate = certify(trained_network.module, holdout.x[:SAMPLES], holdout.y[:SAMPLES])
    candidates_and_scores = {}
    for title, result in zip(("trained", "never trained"), results.values(), strict=True):
        assert result.scores is not None
        candidates_and_scores[title] = (all_candidates(result.reconstructions[0]).x, result.scores)
    if figure := compared_figure(candidates_and_scores, split.train):
        write_atomic(out / PICTURE, figure)
    summary = {
        **{audit: read_result(out / audit) for audit in results},
        "certificate_holdout": certificate.to_json(),
        "photos": photo_results,
        "picture": str(out / PICTURE),
        "report": str(out / "trained" / "report.html"),
    }
    write_json(out / "demo.json", summary)
    return summary


def _show(results: dict[str, AuditResult], summary: dict[str, Any]) -> None:
    """Print the results of the demo: both audits, and how many photographs were reconstructed."""
    scores = [result.scores for result in results.values() if result.scores is not None]
    verdicts = [result.verdict for result in results.values()]
    residuals = [result.attacks[0].residual for result in results.values()]
    table_rows = [
        ("verdict", *(verdict.outcome for verdict in verdicts)),
        ("digits recovered", *(f"{s.recovered} of {s.n}, {s.rule}" for s in scores)),
        ("expected by chance", *(format_number(s.expected_by_chance, 2) for s in scores)),
        ("p-value, permutation test", *(format_number(s.p_value, 2) for s in scores)),
        ("residual of the first layer", *(format_number(value) for value in residuals)),
    ]
    title = f"{ARCH} trained on {SAMPLES} digits, odd against even: attack from the weights"
    print_table(title, ("what", "trained", "never trained"), table_rows)
    training, holdout = summary["trained"]["certificate"], summary["certificate_holdout"]
    table_rows = [
        (name, format_number(training[key]), format_number(holdout[key]))
        for name, key in CERTIFICATE_ROWS.items()
    ]
    print_table(
        "certificate: how close the network is to a KKT point of the digits",
        ("what", "training digits", "held-out digits"),
        table_rows,
    )
    photo_results = summary["photos"]
    photo_scores = [photo_results["trained"], photo_results["untrained"]]
    table_rows = [
        ("photos recovered", *(f"{c['recovered']} of {c['n']}, {c['rule']}" for c in photo_scores)),
        ("expected by chance", *(format_number(c["expected_by_chance"], 2) for c in photo_scores)),
        ("p-value, permutation test", *(format_number(c["p_value"], 2) for c in photo_scores)),
    ]
    title = (
        f"{PHOTO_ARCH} trained on {PHOTOS} crops of photographs: unmixed from the first layer in "
        f"{photo_results['seconds']:.1f} s"
    )
    print_table(title, ("what", "trained", "never trained"), table_rows)
    known_facts = summary["trained"]["knowledge"]
    knowledge_text = ", ".join(f"{item['fact']} ({item['provenance']})" for item in known_facts)
    print_line(f"known to the attacker: {knowledge_text}")
    print_line(f"pictures, reconstructions above training images: {summary['picture']} and")
    print_line(f"  {photo_results['picture']}")


def _check_verdicts(results: dict[str, AuditResult]) -> None:
    """Raise an error unless the trained network leaks and the untrained network does not."""
    from residuum.auditing.verdict import LEAK
    from residuum.errors import InconclusiveError

    verdict_of_audit = {audit: result.verdict.outcome for audit, result in results.items()}
    if verdict_of_audit["trained"] != LEAK or verdict_of_audit["untrained"] == LEAK:
        raise InconclusiveError(
            f"The demo must find a leak in the trained network and no leak in the untrained network; got "
            f"{verdict_of_audit}.",
            "Report this error with the output of residuum --version --verbose.",
        )
