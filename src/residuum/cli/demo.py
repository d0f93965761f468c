"""``residuum demo``: the whole way on bundled data, from training to an audited network.

The demo audits two networks with the same settings: one that was trained on digits, and one that was
never trained, in which nothing can be found. Then it unmixes color photographs from a first layer in a
second.

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
from residuum.cli.output import attack_progress, number, print_line, print_table, training_progress

if TYPE_CHECKING:
    from residuum.attacks.base import AttackProgress
    from residuum.auditing.result import AuditResult
    from residuum.networks.network import Network
    from residuum.records import Split

ARCH, SAMPLES, STEPS = "mlp:64-200-200-1", 20, 5000
RESTARTS, ATTACK_STEPS = 4, 2000
PICTURE = "reconstructions.png"
PHOTO_ARCH, PHOTOS, PHOTO_STEPS, PHOTO_SECONDS = "mlp:3072-300-300-1", 40, 600, 2.0
PHOTO_PICTURE = "photos.png"
CERTIFIED = {"KKT residual, plain": "residual_plain", "KKT residual, Clarke": "residual_clarke"}
CERTIFIED |= {"margin": "margin"}
NETWORKS = {"trained": "network", "untrained": "untrained-network"}  # audit folder: weights


app = options.command_app("demo", __doc__)


@app.default
def command(
    *,
    out: Annotated[
        Path,
        Parameter(help="Folder for both audits, the picture and demo.json.", show_default=True),
    ] = Path("runs/demo"),
    output: options.Output = options.OUTPUT,
) -> None:
    """Train on bundled digits, audit the weights and those of a network that was never trained, report."""
    from residuum.auditing.result import AuditResult
    from residuum.datasets import load_dataset
    from residuum.records import make_directory, write_atomic
    from residuum.records.rundir import use_one_thread

    make_directory(out)  # before the work, not after it
    write_atomic(out / ".gitignore", "*\n")
    split = load_dataset("digits", SAMPLES)
    with use_one_thread():
        checkpoint = _networks(out, split, output.visible)
        for name in NETWORKS:
            with attack_progress(output.visible) as watch:
                _audit(out, name, watch)
        photos = _photos(out, output.visible)
    results = {audit: AuditResult.load(out / audit) for audit in NETWORKS}
    summary = _write(out, split, checkpoint, results, photos)
    output.result(summary, lambda: _show(results, summary))
    _check(results)
    if output.visible:
        print_line(f"report: {out / 'trained' / 'report.html'}")


def _networks(out: Path, split: Split, spoken: bool) -> Network:
    """The victim, in a training directory of its own, and its architecture with random weights."""
    from residuum.io.checkpoints import save_checkpoint
    from residuum.networks import Architecture
    from residuum.stationarity import parameters
    from residuum.training import TrainingConfig, initialize, released, train
    from residuum.training.directory import write_run

    config = TrainingConfig(steps=STEPS)
    with training_progress(spoken) as watch:
        state = train(ARCH, split.train, config, watch=watch)
    (out / "network" / "private").mkdir(parents=True, exist_ok=True)
    write_run(out / "network", ARCH, split, config, state, "binary", "cpu")
    victim = released(state, ARCH, split.train, "binary")
    model = initialize(Architecture.parse(ARCH), TrainingConfig(init="default"))
    file = out / NETWORKS["untrained"] / "model.safetensors"
    save_checkpoint(victim.replace(theta=parameters(model)), file)
    return victim


def _photos(out: Path, spoken: bool) -> dict[str, Any]:
    """Unmix color photographs from a first layer and from a layer that was never trained."""
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
    from residuum.training import TrainingConfig, initialize, released, train

    split = load_dataset("photos", PHOTOS, seed=0)
    config = TrainingConfig(steps=PHOTO_STEPS, dtype="float32")
    with training_progress(spoken) as watch:
        state = train(PHOTO_ARCH, split.train, config, watch=watch)
    victim = released(state, PHOTO_ARCH, split.train, "binary")
    save_checkpoint(victim, out / "photos-network" / "model.safetensors")
    mean, shape = split.train.mean, split.train.shape
    told = Knowledge(shape, value_range=(0, 1), mean=mean, provenance={"mean": "train"})
    found = Unmix(seconds=PHOTO_SECONDS).run(victim, told)
    # A layer never trained has no clean direction and is refused: it is given as many as the other.
    drawn = initialize(Architecture.parse(PHOTO_ARCH), TrainingConfig(init="default"))
    layer = first_layer(parameters(drawn)).float()
    sources = unmix(layer, split.train.shape, LADDER[0], rank=len(found.x))
    never = sources.x.reshape(-1, *split.train.shape)
    bands = {}
    for title, x in (("this network", found.x), ("one never trained", never)):
        bands[title] = (x, score(x, split.train, split.holdout, metrics=["ncc"]))
    if figure := compared_figure(bands, split.train):
        write_atomic(out / PHOTO_PICTURE, figure)
    names = ("recovered", "n", "rule", "expected_by_chance", "p_value")
    counts = [{name: getattr(part, name) for name in names} for _, part in bands.values()]
    return {
        "arch": PHOTO_ARCH,
        "picture": str(out / PHOTO_PICTURE),
        "seconds": found.seconds,
        "trained": counts[0],
        "untrained": counts[1],
        "notes": list(found.notes),
    }


def _audit(out: Path, name: str, watch: Callable[[AttackProgress], None] | None) -> None:
    """Audit one of the two networks with a fixed attack, so that figures repeat."""
    from residuum.auditing.listener import AuditListener
    from residuum.auditing.run import audit

    class Bar(AuditListener):
        def watch_attack(self, *_: Any) -> Callable[[AttackProgress], None] | None:
            return watch

    audit(
        out / NETWORKS[name] / "model.safetensors",
        data=out / "network",
        holdout=out / "network",
        knowledge={"value_range": (0, 1), "mean": "train", "sample_count": SAMPLES},
        attacks=[{"attack": "binary-kkt", "restarts": RESTARTS, "steps": ATTACK_STEPS}],
        out=out / name,
        listener=Bar(),
    )


def _write(
    out: Path,
    split: Split,
    checkpoint: Network,
    results: dict[str, AuditResult],
    photos: dict[str, Any],
) -> dict[str, Any]:
    """The picture of both side by side, and the figures in ``demo.json``."""
    from residuum.auditing.artifacts import read_result
    from residuum.evaluation.scoring import all_candidates
    from residuum.records import write_atomic, write_json
    from residuum.report.figures import compared_figure
    from residuum.theory import certify

    holdout = split.holdout
    control = certify(checkpoint.module, holdout.x[:SAMPLES], holdout.y[:SAMPLES])
    bands = {}
    for title, result in zip(("this network", "one never trained"), results.values(), strict=True):
        assert result.scores is not None
        bands[title] = (all_candidates(result.reconstructions[0]).x, result.scores)
    if figure := compared_figure(bands, split.train):
        write_atomic(out / PICTURE, figure)
    summary = {
        **{audit: read_result(out / audit) for audit in results},
        "certificate_holdout": control.to_json(),
        "photos": photos,
        "picture": str(out / PICTURE),
        "report": str(out / "trained" / "report.html"),
    }
    write_json(out / "demo.json", summary)
    return summary


def _show(results: dict[str, AuditResult], summary: dict[str, Any]) -> None:
    """Print both audits in one table, then the certificate next to one of held-out digits."""
    parts = [result.scores for result in results.values() if result.scores is not None]
    verdicts = [result.verdict for result in results.values()]
    residuals = [result.attacks[0].residual for result in results.values()]
    rows = [
        ("verdict", *(verdict.outcome for verdict in verdicts)),
        ("digits recovered", *(f"{part.recovered} of {part.n}, {part.rule}" for part in parts)),
        ("expected by chance", *(number(part.expected_by_chance, 2) for part in parts)),
        ("p, permutation test", *(number(part.p_value, 2) for part in parts)),
        ("residual of the first layer", *(number(value) for value in residuals)),
    ]
    title = f"{ARCH} trained on {SAMPLES} digits, odd against even: attack from the weights"
    print_table(title, ("what", "this network", "one never trained"), rows)
    mine, other = summary["trained"]["certificate"], summary["certificate_holdout"]
    rows = [(name, number(mine[key]), number(other[key])) for name, key in CERTIFIED.items()]
    print_table("certificate", ("what", "training digits", "held-out digits"), rows)
    photos = summary["photos"]
    both = [photos["trained"], photos["untrained"]]
    rows = [
        (
            "photos recovered",
            *(f"{part['recovered']} of {part['n']}, {part['rule']}" for part in both),
        ),
        ("expected by chance", *(number(part["expected_by_chance"], 2) for part in both)),
        ("p, permutation test", *(number(part["p_value"], 2) for part in both)),
    ]
    title = (
        f"{PHOTO_ARCH} trained on {PHOTOS} crops of photographs: unmixed from the first layer in "
        f"{photos['seconds']:.1f} s"
    )
    print_table(title, ("what", "this network", "one never trained"), rows)
    facts = summary["trained"]["knowledge"]
    known = ", ".join(f"{fact['fact']} ({fact['provenance']})" for fact in facts)
    print_line(f"known to the attacker: {known}")
    print_line(f"pictures, found above and training images below: {summary['picture']} and")
    print_line(f"  {photos['picture']}")


def _check(results: dict[str, AuditResult]) -> None:
    """The trained network leaks, the other one does not; anything else is not what this shows."""
    from residuum.auditing.verdict import LEAK
    from residuum.errors import InconclusiveError

    found = {audit: result.verdict.outcome for audit, result in results.items()}
    if found["trained"] != LEAK or found["untrained"] == LEAK:
        raise InconclusiveError(
            f"The demo expects a leak from the trained network alone; it found {found}.",
            "Report this with the output of residuum --version --verbose.",
        )
