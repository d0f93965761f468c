"""Find updates: files that hold a gradient or a weight difference in place of weights.

An update is a sum of gradients at a few training samples. The first layer of a network with ReLU often gives
these samples exactly, so the finding is severe (``attacks/unmixing/sparse_factors.py``).
"""

from __future__ import annotations

import shlex

from residuum.errors import ResiduumError
from residuum.io.checkpoints import load_checkpoint
from residuum.io.release import Release
from residuum.io.updates import recognize_update
from residuum.scanning.finding import UPDATE, Finding, printable

REASON = (
    "An update of federated learning is a sum of gradients at the samples of one client. Anyone who has "
    "the update can reconstruct these samples, some of them exactly"
)


def find_updates(release: Release, base: Release | None = None) -> list[Finding]:
    """Return a finding if a file holds a gradient or a weight difference in place of weights.

    Args:
        release: The file.
        base: The file with the weights before training, None if it is not known.

    Returns:
        One finding, or none if the file may hold weights.
    """
    try:
        theta = load_checkpoint(release).theta
        base_theta = None if base is None else load_checkpoint(base).theta
        signs = recognize_update(theta, release.path.name, base_theta)
    except ResiduumError:
        return []
    if not signs:
        return []
    command = ["residuum", "audit", "--update", printable(str(release.path))]
    command += [] if base is None else ["--base", printable(str(base.path))]
    remedy = (
        "Do not store or send updates of single clients in the clear. Use secure aggregation or differential "
        f"privacy. Attack the update: {shlex.join([*command, '--data', 'SAMPLES', '--out', 'RUN'])}"
    )
    return [
        Finding(
            UPDATE,
            "high",
            "this file holds no weights but a gradient or a weight difference",
            "",
            f"{REASON}. Recognized because {printable('; '.join(signs))}",
            remedy,
        )
    ]
