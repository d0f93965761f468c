"""Refael et al. 2025, Fig. 1, drawn from an actual network: regions, a merge, a split."""

from __future__ import annotations

import torch

from residuum.reproduce.context import Context
from residuum.reproduce.exact import triangle
from residuum.reproduce.outcome import Outcome, Row

SHARE = 0.8  # of the exact budget


def plane(context: Context) -> Outcome:
    """An exact KKT point in the plane: two samples merged, one split along its margin, one split too far."""
    point = triangle()
    given = point.set
    merged = given.merge(0, 3)
    i = torch.tensor([1])
    nu = given.directions("softest", i)[0]
    reach = float(given.budgets(nu, i).least[0])
    inside = given.split(1, nu, SHARE * reach)
    beyond = given.split(1, nu, 1.5 * reach, check=False)
    weight, bias = (t.numpy() for t in (point.model.linears[0].weight, point.model.linears[0].bias))
    rows = (
        Row("residual of the training set", given.residual, corrected=0.0),
        Row("residual after a merge", merged.residual, published=0.0, corrected=0.0),
        Row("residual after a split inside the budget", inside.residual, 0.0, corrected=0.0),
        Row(
            "residual after a split beyond the budget", beyond.residual, note="no KKT set any more"
        ),
        Row("margin after the merge", merged.margin, 1.0, corrected=1.0),
        Row(
            "margin after the split",
            inside.margin,
            1.0,
            corrected=1.0,
            note="the direction is orthogonal to grad_x Phi",
        ),
        Row("exact budget of the split", reach),
    )
    arrays = {
        "weight": weight,
        "bias": bias,
        "x": given.x.numpy(),
        "y": given.y.numpy(),
        "merged": merged.x.numpy(),
        "merged_y": merged.y.numpy(),
        "split": inside.x.numpy(),
        "split_y": inside.y.numpy(),
        "nu": nu.numpy(),
    }
    return Outcome(rows, arrays, {"network": "2-3-1, closed form, six samples on margin 1"})
