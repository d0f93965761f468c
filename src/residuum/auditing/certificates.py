"""The certificate stage: KKT residuals, and what equal pairs keep of a reconstruction.

With training data the KKT certificate is of the data; without, of the best restart's candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residuum.auditing.budget import LEAST_UNIQUENESS
from residuum.checkpoints import build_model
from residuum.errors import ResiduumError
from residuum.records import Certificate, Checkpoint, Dataset, Knowledge, Reconstruction
from residuum.records.certificate import Uniqueness
from residuum.theory import certify
from residuum.theory.uniqueness import uniqueness

MOST_SAMPLES = 1000  # of a KKT certificate: its multipliers are a problem in as many unknowns
MOST_CERTIFIED = 40
MOST_UNKNOWNS = 400_000
TRAINING, CANDIDATES = "training samples", "candidates of the best restart"


def kkt_certificate(
    checkpoint: Checkpoint,
    train: Dataset | None,
    found: tuple[Reconstruction, ...],
    *,
    task: str,
    seconds: float,
) -> tuple[Certificate | None, str]:
    """The certificate and what it is of; None and the reason where there is none.

    seconds: gates at kinks are freed as long as that.
    """
    if train is not None:
        x, y, subject = train.x, train.y, TRAINING
    else:
        rows = _best_rows(found)
        if rows is None:
            return None, "no restart converged to candidates that could be certified"
        x, y, subject = found[0].x[rows], found[0].labels[rows], CANDIDATES
    if len(x) > MOST_SAMPLES:
        return None, f"not computed for more than {MOST_SAMPLES} samples; there are {len(x)}"
    try:
        return certify(build_model(checkpoint), x, y, task=task, seconds=seconds), subject
    except ResiduumError as problem:
        if train is not None:
            raise
        # Candidates are nobody's input: no error of the user's.
        return None, f"candidates cannot be certified ({problem.message})"
    except RuntimeError as problem:  # a forward of somebody's own that torch cannot transform
        if checkpoint.module is None:
            raise
        return None, f"not for this kind of network ({str(problem).splitlines()[0][:200]})"


def uniqueness_certificate(
    checkpoint: Checkpoint,
    found: tuple[Reconstruction, ...],
    knowledge: Knowledge,
    *,
    task: str,
    seconds: float,
) -> tuple[Uniqueness | None, str]:
    """What equal pairs keep of the best restart's candidates, heaviest first, as time allows.

    ``index`` of the result counts the candidates of the first reconstruction. None and the reason
    where it is not computed.
    """
    if checkpoint.module is not None:
        return (
            None,
            "not for this kind: where a network that is kept as given has its switches is not known",
        )
    if seconds < LEAST_UNIQUENESS:
        return None, f"not computed: the budget leaves it less than {LEAST_UNIQUENESS:g} seconds"
    rows = _best_rows(found)
    if rows is None:
        return None, "no restart converged to candidates that could be certified"
    part = found[0]
    if len(rows) * part.x[0].numel() > MOST_UNKNOWNS:
        return None, f"not computed for more than {MOST_UNKNOWNS} unknown values"
    try:
        unique = uniqueness(
            build_model(checkpoint), part.x[rows], part.labels[rows], part.lam[rows],
            task=task, box=knowledge.box(part.x[0].double()), samples=MOST_CERTIFIED, seconds=seconds,
        )  # fmt: skip
    except ResiduumError as problem:  # candidates are nobody's input: no error of the user's
        return None, f"not computed: {problem.message}"
    return unique.replace(index=rows[unique.index]), ""


def _best_rows(found: tuple[Reconstruction, ...]) -> Tensor | None:
    """Candidates of the first attack's restart with the least loss, heaviest first. (k,)."""
    run = found[0].best_restart if found else None
    if run is None:
        return None
    part = found[0]
    mine = (part.run == run) & torch.isfinite(part.x.flatten(1)).all(1) & (part.weight > 0)
    rows = mine.nonzero().flatten()
    return rows[part.weight[rows].argsort(descending=True, stable=True)] if len(rows) else None
