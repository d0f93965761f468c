"""``residuum demo``: a laptop-sized run on bundled data."""

from __future__ import annotations

from residuum.cli import certify as certify_command
from residuum.cli.options import Json, Quiet
from residuum.cli.output import number, print_json, print_table, training_progress

EXAMPLES = """Examples:

residuum demo

residuum demo --json
"""
ARCH, SAMPLES, STEPS = "mlp:64-100-1", 20, 1500


def command(json: Json = False, quiet: Quiet = False) -> None:
    """Train a small network on bundled digits to its margin and certify it."""
    from residuum.checkpoints import build_model
    from residuum.datasets import load_dataset
    from residuum.theory import certify
    from residuum.training import TrainingConfig, released, train

    split = load_dataset("digits", SAMPLES)
    with training_progress(not (json or quiet)) as watch:
        state = train(ARCH, split.train, TrainingConfig(steps=STEPS), watch=watch)
    model = build_model(released(state, ARCH, split.train, "binary"))
    found = certify(model, split.train.x, split.train.y)
    # The same question about samples the network never saw: the control every figure needs.
    control = certify(model, split.holdout.x[:SAMPLES], split.holdout.y[:SAMPLES])
    if json:
        print_json({"certificate": found.to_json(), "control": control.to_json()})
    elif not quiet:
        certify_command.show(found, f"{ARCH} trained on {SAMPLES} digits, odd against even")
        print_table(
            "the same residuals on digits it never saw",
            ("what", "training digits", "held-out digits"),
            [
                (
                    "KKT residual, plain",
                    number(found.residual_plain),
                    number(control.residual_plain),
                ),
                (
                    "KKT residual, Clarke",
                    number(found.residual_clarke),
                    number(control.residual_clarke),
                ),
                ("margin", number(found.margin), number(control.margin)),
            ],
        )
