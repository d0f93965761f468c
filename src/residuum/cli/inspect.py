"""``residuum inspect``: what a checkpoint is, before any attack.

Examples:

residuum inspect model.safetensors

residuum inspect weights.pt --arch mlp:784-1000-1000-1 --json
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from residuum.cli.options import ARCH, INIT_FILE, OWN, CheckpointPath, Voice, grant
from residuum.cli.output import number, print_line, print_notes, print_table

if TYPE_CHECKING:
    from residuum.surfaces.inspection import Inspection


def command(checkpoint: CheckpointPath, *, arch: str | None = ARCH, voice: Voice) -> None:
    """Show layers, homogeneity, directions of the first layer, and which attacks apply."""
    from residuum.attacks import every_attack
    from residuum.errors import InputError
    from residuum.io.checkpoints import load_checkpoint
    from residuum.io.release import open_release
    from residuum.records import Knowledge
    from residuum.surfaces.inspection import inspect_checkpoint
    from residuum.surfaces.surface import WEIGHTS, surfaces

    released = load_checkpoint(checkpoint, arch)
    found = inspect_checkpoint(released)
    own = checkpoint.is_dir() and (checkpoint / INIT_FILE).is_file()
    knowledge = grant(open_release(checkpoint), released, init=OWN if own else None)
    there = surfaces(released, Knowledge())
    with suppress(InputError):  # a start that equals the weights leaves no change to look at
        there = surfaces(released, knowledge)
    attacks = []
    for name, attack in every_attack().items():
        surface = there.get(attack.surface, there[WEIGHTS])
        why_not = attack.why_not(surface, knowledge)
        reason = why_not or attack.why(surface)
        attacks.append({"attack": name, "applies": not why_not, "reason": reason})
    voice.answer({**found.to_json(), "attacks": attacks}, lambda: show(found, attacks))


def show(found: Inspection, attacks: list[dict[str, Any]]) -> None:
    """The inspection as a person reads it."""
    layers = [
        (part.name, "x".join(map(str, part.shape)), str(part.parameters), number(part.norm))
        for part in found.layers
    ]
    title = f"{found.arch}: {found.parameters} parameters"
    print_table(title, ("tensor", "shape", "values", "norm"), layers)
    degree = found.homogeneity_order
    order = "not homogeneous" if degree is None else f"order {degree:g}"
    print_line(f"homogeneity: {order}; balance gap {number(found.balance)}")
    print_line(f"directions of the first layer: {number(found.directions)} ({found.directions_of})")
    ranks = [(f"{tolerance:g} of the largest", str(rank)) for tolerance, rank in found.ranks]
    print_table("first layer", ("singular values above", "rank"), ranks)
    rows = [(a["attack"], "yes" if a["applies"] else "no", a["reason"]) for a in attacks]
    print_table("attacks", ("attack", "applies", "why"), rows)
    print_notes(found.assumptions, "assumed")
