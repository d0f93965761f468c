"""Test whether the weights reveal a missing value of a training record to an attacker who knows the others.

For every cell of the training table, :mod:`residuum.networks.inferred_cells` infers the value from the
other columns of the same record and from the weights. It reports cells at a false discovery rate of 5%. The
owner of the data knows the true values, so this module compares:

- A reported cell is right if the inferred value is within 0.02 standard deviations of the true value, or is
  the true value of a column with few values.
- A cell is imputable if a ridge regression on held-out records predicts the value as well. Such a value is no
  secret of the training record, because it follows from the other columns in general.
- A cell is disclosed if it is reported, right and not imputable. Only disclosed cells are a finding.

The same computation with held-out records in the place of training records is the negative control. It should
report no cell. An audit tests attributes only if its test of membership rejects, so attributes add no false
leaks. If the network never saw the records, the test of membership must reject falsely first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from residuum.errors import ArchitectureError
from residuum.networks.inferred_cells import (
    LEVEL,
    InferredCells,
    Variable,
    find_variables,
    infer_cells,
)
from residuum.networks.missing_values import EQUAL_VALUES
from residuum.networks.network import Network
from residuum.records.base import Record

# A finding needs at least this number of records with a disclosed value, as for membership.
MIN_RECORDS = 3
# Ridge regression uses at most this number of held-out records, and this penalty on standardized columns.
MAX_IMPUTATION_RECORDS, RIDGE_PENALTY = 400, 1.0
MAX_COLUMNS = (
    200  # with more columns, the samples are images or embeddings, whose values are no attributes
)
ROUNDING = 1e-9  # difference up to which two choices of a column with few values count as equal


@dataclass(frozen=True, eq=False)
class DisclosedCell(Record):
    """A value of a training record that the weights disclose to an attacker who knows the other columns.

    Attributes:
        row: Index of the record among the training records.
        columns: Indices of the columns, several for a group of one-hot columns.
        original: True values of these columns.
        inferred: Inferred values.
        imputed: Values that ridge regression on held-out records predicts.
        q: The smallest false discovery rate at which the cell is reported.
    """

    row: int
    columns: tuple[int, ...]
    original: tuple[float, ...]
    inferred: tuple[float, ...]
    imputed: tuple[float, ...]
    q: float


@dataclass(frozen=True, eq=False)
class AttributeTest(Record):
    """The result of a test of attributes on n training records.

    Attributes:
        records: Number n of training records.
        variables: Number of variables (columns or groups of one-hot columns) that were tested.
        reported: Number of cells whose inferred values are reported.
        right: Number of reported cells whose inferred value is right.
        imputable: Number of right cells that ridge regression predicts as well.
        disclosed: The reported, right cells that are not imputable, by record.
        holdout_cells: Number of cells of held-out records that were tested as a negative control.
        holdout_reported: Number of these cells whose values are reported.
        reason: Why nothing was tested, "" if the test ran.
    """

    derived: ClassVar[tuple[str, ...]] = ("is_finding", "line", "rows")

    records: int
    variables: int = 0
    reported: int = 0
    right: int = 0
    imputable: int = 0
    disclosed: tuple[DisclosedCell, ...] = ()
    holdout_cells: int = 0
    holdout_reported: int = 0
    reason: str = ""

    @property
    def rows(self) -> tuple[int, ...]:
        """Indices of the training records with at least one disclosed value."""
        return tuple(sorted({cell.row for cell in self.disclosed}))

    @property
    def is_finding(self) -> bool:
        """Whether enough records have a disclosed value, and the negative control reports fewer cells."""
        has_clean_control = self.holdout_reported * self.records * self.variables <= (
            LEVEL * self.reported * max(1, self.holdout_cells)
        )
        return len(self.rows) >= MIN_RECORDS and has_clean_control

    @property
    def line(self) -> str:
        """A sentence for the user that says how many records have a value that can be inferred."""
        if self.reason:
            return f"Attributes were not tested: {self.reason}."
        cells = self.records * self.variables
        wrong = self.reported - self.right
        return (
            f"For {len(self.rows)} of {self.records} training records, an attacker who knows the other "
            f"columns can infer a missing value from the weights ({self.reported} of {cells} cells reported, "
            f"{wrong} of them wrong, and {self.imputable} can be predicted without the network). For "
            f"held-out records, {self.holdout_reported} of {self.holdout_cells} cells are reported."
        )


def measure_attributes(
    network: Network,
    train: Tensor,
    holdout: Tensor,
    *,
    sensitive: Sequence[int] | None = None,
    one_hot: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
) -> AttributeTest:
    """Infer every sensitive value of every training record, and compare it with the true value.

    Args:
        network: The network.
        train: Training records (n, d) as the network receives them.
        holdout: Records that the network never saw, (N, d).
        sensitive: Indices of the columns to test. By default, all columns.
        one_hot: Groups of one-hot columns by index. By default, they are recognized from the records.
        seed: Seed of the decoys.

    Returns:
        The result of the test.
    """
    n, d = len(train), train[0].numel()
    if d > MAX_COLUMNS:
        return AttributeTest(n, reason=f"the samples have {d} values and are no rows of a table")
    train, holdout = train.flatten(1).double(), holdout.flatten(1).double()
    pool = torch.cat([train, holdout])
    variables = find_variables(pool, one_hot)
    if sensitive is not None:
        variables = tuple(v for v in variables if set(v.columns) & set(sensitive))
    if not variables:
        return AttributeTest(n, reason="no sensitive column has more than one value")
    controls = holdout[:n]
    try:
        cells = infer_cells(network, train, pool, variables, seed)
        control_cells = infer_cells(network, controls, pool, variables, seed)
    except ArchitectureError as problem:
        return AttributeTest(n, reason=problem.message.rstrip("."))
    deviation = pool.std(0, correction=0)
    is_right = _is_right(cells, train, deviation)
    imputed = impute(holdout, train, variables)
    is_imputable = _agrees(imputed, train, variables, deviation)
    is_reported = cells.is_reported
    filled = cells.fill(train)
    disclosed = (is_reported & is_right & ~is_imputable).nonzero().tolist()
    return AttributeTest(
        records=n,
        variables=len(variables),
        reported=int(is_reported.sum()),
        right=int((is_reported & is_right).sum()),
        imputable=int((is_reported & is_right & is_imputable).sum()),
        disclosed=tuple(
            DisclosedCell(
                row=row,
                columns=variables[i].columns,
                original=tuple(train[row, [*variables[i].columns]].tolist()),
                inferred=tuple(filled[row, [*variables[i].columns]].tolist()),
                imputed=tuple(imputed[row, [*variables[i].columns]].tolist()),
                q=float(cells.q[row, i]),
            )
            for row, i in disclosed
        ),
        holdout_cells=len(controls) * len(variables),
        holdout_reported=int(control_cells.is_reported.sum()),
    )


def impute(reference: Tensor, x: Tensor, variables: Sequence[Variable]) -> Tensor:
    """Predict every variable of records from their other columns, by ridge regression on other records.

    Args:
        reference: Records (N, d) on which the regression is fitted.
        x: Records (n, d) whose values are predicted.
        variables: The variables to predict. A predicted choice is the nearest possible value.

    Returns:
        The records (n, d) with every variable replaced by its prediction.
    """
    reference = reference[:MAX_IMPUTATION_RECORDS].double()
    center, deviation = reference.mean(0), reference.std(0, correction=0).clamp(min=1e-12)
    fitted, scaled = (reference - center) / deviation, (x.double() - center) / deviation
    imputed = x.double().clone()
    for variable in variables:
        columns = [*variable.columns]
        inputs = [c for c in range(x.shape[1]) if c not in variable.columns]
        features = fitted[:, inputs]
        gram = features.T @ features + RIDGE_PENALTY * torch.eye(len(inputs), dtype=torch.float64)
        coefficients = torch.linalg.solve(gram, features.T @ fitted[:, columns])
        prediction = scaled[:, inputs] @ coefficients * deviation[columns] + center[columns]
        if variable.choices is not None:
            prediction = variable.choices[torch.cdist(prediction, variable.choices).argmin(1)]
        imputed[:, columns] = prediction
    return imputed


def _is_right(cells: InferredCells, x: Tensor, deviation: Tensor) -> Tensor:
    """Return whether the inferred value of each cell is right, (n, V)."""
    has_value = cells.value.isfinite()
    return has_value & _agrees(cells.fill(x), x, cells.variables, deviation)


def _agrees(values: Tensor, x: Tensor, variables: Sequence[Variable], deviation: Tensor) -> Tensor:
    """Return whether two tables (n, d) agree in each variable, (n, V)."""
    columns_of_agreement = []
    for variable in variables:
        columns = [*variable.columns]
        tolerance = EQUAL_VALUES * deviation[columns] if variable.choices is None else ROUNDING
        difference = (values[:, columns] - x[:, columns]).abs()
        columns_of_agreement.append((difference <= tolerance).all(1))
    return torch.stack(columns_of_agreement, 1)
