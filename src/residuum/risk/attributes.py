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

import torch
from torch import Tensor

from residuum.errors import ArchitectureError, InputError, require_known
from residuum.networks.inferred_cells import (
    LEVEL,
    InferredCells,
    Variable,
    find_variables,
    infer_cells,
)
from residuum.networks.missing_values import EQUAL_VALUES
from residuum.networks.network import Network
from residuum.records import Dataset
from residuum.records.attribute_test import AttributeTest, DisclosedCell

# Ridge regression uses at most this number of held-out records, and this penalty on standardized columns.
MAX_IMPUTATION_RECORDS, RIDGE_PENALTY = 400, 1.0
MAX_COLUMNS = (
    200  # with more columns, the samples are images or embeddings, whose values are no attributes
)
MAX_DISCLOSED = 1000  # largest number of disclosed cells in a result, see ``_interleave_records``
ROUNDING = 1e-9  # difference up to which two choices of a column with few values count as equal


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
        level=LEVEL,
        rows=tuple(sorted({row for row, _ in disclosed})),
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


def measure_table(
    network: Network,
    train: Dataset,
    holdout: Dataset,
    *,
    sensitive: Sequence[str] = (),
    one_hot: Sequence[Sequence[int]] | None = None,
    max_records: int | None = None,
    seed: int = 0,
) -> AttributeTest:
    """Infer the sensitive values of a training table, and describe them in the words of the user.

    The disclosed cells have the rows, identifiers, column names and original units of the table.

    Args:
        network: The network.
        train: The training records, as the network receives them.
        holdout: Records that the network never saw.
        sensitive: Names or numbers of the columns to test. By default, all columns.
        one_hot: Groups of one-hot columns by index. By default, they are recognized from the records.
        max_records: Largest number of training records to test, which are then drawn at random.
        seed: Seed of the decoys and of the drawn records.

    Returns:
        The result of the test.
    """
    columns = find_sensitive_columns(sensitive, train) if sensitive else None
    n = len(train)
    if max_records is not None and n > max_records:
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        train = train.take(order[:max_records].sort().values)
    test = measure_attributes(
        network, train.x, holdout.x, sensitive=columns, one_hot=one_hot, seed=seed
    )
    cells = _interleave_records(test.disclosed)
    return test.replace(
        untested=n - len(train),
        rows=tuple(train.rows[row] for row in test.rows),
        disclosed=tuple(_describe(cell, train) for cell in cells[:MAX_DISCLOSED]),
    )


def find_sensitive_columns(sensitive: Sequence[str], train: Dataset) -> list[int]:
    """Return the indices of columns that the user passed by name or number.

    Args:
        sensitive: Names or numbers of columns. Columns are counted from 0.
        train: The table.

    Returns:
        The indices.

    Raises:
        InputError: If the table has no such column.
    """
    count = train.x[0].numel()
    columns = []
    for name in sensitive:
        if name in train.features:
            columns.append(train.features.index(name))
        elif name.isdecimal() and int(name) < count:
            columns.append(int(name))
        elif train.features:
            require_known(name, train.features, "The table has no column", InputError)
        else:
            raise InputError(
                f"A sensitive column must be a number from 0 to {count - 1}, because the columns have no "
                f"names; got {name!r}.",
                "Example: --sensitive 0.",
            )
    return columns


def _interleave_records(disclosed: Sequence[DisclosedCell]) -> list[DisclosedCell]:
    """Return cells with the most certain cell of each record first, then the second cells, and so on."""
    by_certainty = sorted(disclosed, key=lambda cell: (cell.q, cell.row, cell.columns))
    count_by_row: dict[int, int] = {}
    positions = []
    for cell in by_certainty:
        positions.append(count_by_row.get(cell.row, 0))
        count_by_row[cell.row] = positions[-1] + 1
    order = sorted(range(len(by_certainty)), key=positions.__getitem__)
    return [by_certainty[i] for i in order]


def _describe(cell: DisclosedCell, train: Dataset) -> DisclosedCell:
    """Return a cell with row, identifier and column names of the user, and values in original units."""
    columns, count = [*cell.columns], train.x[0].numel()
    mean = _per_column(train.mean, count, 0.0)
    scale, offset = _per_column(train.scale, count, 1.0), _per_column(train.offset, count, 0.0)

    def original_units(values: tuple[float, ...]) -> tuple[float, ...]:
        numbers = torch.tensor(values, dtype=torch.float64)
        return tuple(((numbers + mean[columns]) * scale[columns] + offset[columns]).tolist())

    return cell.replace(
        row=train.rows[cell.row],
        original=original_units(cell.original),
        inferred=original_units(cell.inferred),
        imputed=original_units(cell.imputed),
        names=tuple(train.features[column] for column in columns) if train.features else (),
        unit=train.units[columns[0]] if train.units and len(columns) == 1 else "",
        record_id=train.record_ids[cell.row] if train.record_ids else "",
    )


def _per_column(values: Tensor | None, columns: int, default: float) -> Tensor:
    """Return one number for each column, from one number for all columns, one for each, or none."""
    if values is None:
        return torch.full((columns,), default, dtype=torch.float64)
    return values.double().flatten().expand(columns)


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
