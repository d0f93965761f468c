"""Attributes: reported cells are right for members, and nothing is reported for other records."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor

from residuum.errors import InputError
from residuum.networks.inferred_cells import find_variables, infer_cells
from residuum.networks.network import Network
from residuum.records import Dataset
from residuum.risk.attributes import (
    MAX_IMPUTATION_RECORDS,
    find_sensitive_columns,
    impute,
    measure_attributes,
    measure_table,
)

COLUMNS, MEMBERS, HELD_OUT = 6, 12, 150


def table(n: int, seed: int) -> Tensor:
    """Return records with three continuous columns, a binary column and two one-hot columns."""
    generator = torch.Generator().manual_seed(seed)
    continuous = torch.randn(n, 3, generator=generator).double()
    continuous[:, 2] = 0.95 * continuous[:, 0] + 0.05 * continuous[:, 2]
    binary = torch.randint(0, 2, (n, 1), generator=generator).double()
    choice = torch.nn.functional.one_hot(torch.randint(0, 2, (n,), generator=generator), 2)
    return torch.cat([continuous, binary, choice.double()], 1)


def network_with_kinks(members: Tensor, per_record: int = 8) -> Network:
    """Return a network with some boundaries through every member, and as many through no record."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(2 * per_record * len(members), COLUMNS, generator=generator).double()
    bias = torch.randn(len(weight), generator=generator).double()
    on = members.repeat(per_record, 1)
    bias[: len(on)] = -(weight[: len(on)] * on).sum(1)
    outputs = torch.randn(1, len(weight), generator=generator).double() / 10
    theta = {
        "layers.0.weight": weight,
        "layers.0.bias": bias,
        "layers.1.weight": outputs,
        "layers.1.bias": torch.zeros(1).double(),
    }
    return Network(theta, f"mlp:{COLUMNS}-{len(weight)}-1,bias=all")


def test_columns_with_few_values_and_one_hot_groups_are_recognized() -> None:
    x = table(200, 0)
    age = torch.randint(20, 60, (200, 1), generator=torch.Generator().manual_seed(3)).double()
    constant = torch.ones(200, 1).double()
    variables = find_variables(torch.cat([x, age / 10 - 3, constant], 1))
    assert [v.columns for v in variables] == [(0,), (1,), (2,), (3,), (4, 5), (6,)]
    assert [None if v.choices is None else len(v.choices) for v in variables] == [
        *(None, None, None, 2, 2, 40)
    ]
    assert variables[4].choices is not None
    assert variables[4].choices.tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_members_are_reported_and_held_out_records_are_not() -> None:
    members, held_out = table(MEMBERS, 0), table(HELD_OUT, 1)
    result = measure_attributes(network_with_kinks(members), members, held_out)
    assert result.is_finding
    assert len(result.rows) == MEMBERS
    assert result.reported > 0.9 * MEMBERS * result.variables
    assert result.right >= 0.95 * result.reported
    assert result.holdout_reported == 0
    for cell in result.disclosed:
        assert cell.original == tuple(members[cell.row, [*cell.columns]].tolist())
        assert np.allclose(cell.inferred, cell.original, atol=0.02)
        assert not np.allclose(cell.imputed, cell.original, atol=1e-9)
    # The third column nearly follows from the first, so its values are no secret of the record.
    assert {cell.columns for cell in result.disclosed} >= {(0,), (1,)}
    assert result.imputable > 0


def test_records_that_were_never_trained_on_are_no_finding() -> None:
    members, non_members, held_out = table(MEMBERS, 0), table(MEMBERS, 5), table(HELD_OUT, 1)
    result = measure_attributes(network_with_kinks(members), non_members, held_out)
    assert not result.is_finding
    assert result.reported == 0


def test_only_sensitive_columns_are_tested() -> None:
    members, held_out = table(MEMBERS, 0), table(HELD_OUT, 1)
    result = measure_attributes(network_with_kinks(members), members, held_out, sensitive=[1, 5])
    assert result.variables == 2
    assert {cell.columns for cell in result.disclosed} <= {(1,), (4, 5)}


def test_smooth_networks_say_why_nothing_was_tested() -> None:
    members, held_out = table(MEMBERS, 0), table(HELD_OUT, 1)
    network = network_with_kinks(members)
    smooth = Network(network.theta, network.arch + ",activation=gelu")
    result = measure_attributes(smooth, members, held_out)
    assert "ReLU" in result.reason
    assert not result.is_finding


def test_imputation_is_ridge_regression() -> None:
    reference, x = table(300, 2), table(10, 3)
    imputed = impute(reference, x, find_variables(reference))
    center, deviation = reference.mean(0).numpy(), reference.std(0, correction=0).numpy()
    fitted, scaled = (reference.numpy() - center) / deviation, (x.numpy() - center) / deviation
    inputs = [0, 1, 3, 4, 5]
    ridge = Ridge(alpha=1.0, fit_intercept=False).fit(fitted[:, inputs], fitted[:, 2])
    expected = ridge.predict(scaled[:, inputs]) * deviation[2] + center[2]
    np.testing.assert_allclose(imputed[:, 2].numpy(), expected, atol=1e-9)
    assert set(imputed[:, 3].tolist()) <= {0.0, 1.0}
    assert MAX_IMPUTATION_RECORDS > 300


def test_the_error_rate_holds_if_half_of_the_boundaries_are_random() -> None:
    """Networks with few boundaries through members: at most a few reported cells are wrong."""
    wrong = reported = 0
    for seed in range(6):
        members = table(40, 10 + seed)
        network = network_with_kinks(members, per_record=2)
        variables = find_variables(torch.cat([members, table(200, 50)]))
        cells = infer_cells(network, members, members, variables, seed)
        truth = measure_attributes(network, members, table(200, 50), seed=seed)
        assert truth.variables == len(cells.variables)
        reported += truth.reported
        wrong += truth.reported - truth.right
    assert reported > 50
    assert wrong <= 0.1 * reported


def test_cells_of_a_table_have_the_rows_names_and_units_of_the_user() -> None:
    members, held_out = table(MEMBERS, 0), table(HELD_OUT, 1)
    network = network_with_kinks(members)
    scale, offset = torch.arange(1.0, COLUMNS + 1), torch.arange(10.0, 10.0 + COLUMNS)
    names = ("age", "height", "weight", "smoker", "sex_f", "sex_m")
    train = Dataset(
        members,
        torch.zeros(MEMBERS),
        features=names,
        units=("y", "cm", "kg", "", "", ""),
        scale=scale,
        offset=offset,
        row_numbers=100 + torch.arange(MEMBERS),
        record_ids=tuple(f"P{i}" for i in range(MEMBERS)),
    )
    holdout = Dataset(held_out, torch.zeros(HELD_OUT))
    result = measure_table(network, train, holdout, sensitive=["height", "5"])
    plain = measure_attributes(network, members, held_out, sensitive=[1, 5])
    assert result.rows == tuple(100 + row for row in plain.rows)
    assert result.disclosed_count == plain.disclosed_count == len(result.disclosed)
    for cell in result.disclosed:
        assert cell.record_id == f"P{cell.row - 100}"
        assert cell.column in ("height", "sex")
        assert cell.unit == ("cm" if cell.column == "height" else "")
        expected = members[cell.row - 100] * scale + offset
        assert np.allclose(cell.original, expected[[*cell.columns]])
        assert np.allclose(cell.inferred, cell.original, atol=0.02 * 2)
    # The most certain cell of each record comes first.
    first = [cell.row for cell in result.disclosed[: len(result.rows)]]
    assert sorted(first) == list(result.rows)


def test_large_tables_are_tested_on_a_random_subset() -> None:
    members, held_out = table(MEMBERS, 0), table(HELD_OUT, 1)
    train = Dataset(members, torch.zeros(MEMBERS))
    holdout = Dataset(held_out, torch.zeros(HELD_OUT))
    result = measure_table(network_with_kinks(members), train, holdout, max_records=8)
    assert (result.records, result.untested) == (8, MEMBERS - 8)
    assert result.is_finding
    assert result.rows != tuple(range(8))


def test_unknown_sensitive_columns_are_refused() -> None:
    train = Dataset(table(MEMBERS, 0), torch.zeros(MEMBERS))
    assert find_sensitive_columns(["5", "0"], train) == [5, 0]
    with pytest.raises(InputError, match="from 0 to 5"):
        find_sensitive_columns(["age"], train)
    named = train.replace(features=("age", "b", "c", "d", "e", "f"))
    assert find_sensitive_columns(["age", "1"], named) == [0, 1]
    with pytest.raises(InputError, match="aeg") as refused:
        find_sensitive_columns(["aeg"], named)
    assert "Did you mean 'age'" in str(refused.value)
