"""Missing values that the attack "fill" infers, those that it leaves empty, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import residuum as rs
from residuum.attacks.tabular.fill import MIN_KNOWN, borrow_values, why_not
from residuum.errors import ArchitectureError, InputError
from residuum.records import FilledRecords

# Six continuous columns, a group of three one-hot columns, and a binary column.
CONTINUOUS, GROUP, BINARY, COLUMNS = 6, (6, 7, 8), 9, 10
MEMBERS, OTHERS = 20, 80
BOUNDARIES = 10  # through each member


def draw_records(n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Values are inferred up to half a standard deviation beyond the known values.
    numbers = 4 * torch.rand(n, CONTINUOUS, generator=generator).double() - 2
    choice = torch.eye(3).double()[torch.randint(0, 3, (n,), generator=generator)]
    return torch.cat([numbers, choice, torch.randint(0, 2, (n, 1), generator=generator)], 1)


def planted_network(members: Tensor, activation: str = "relu") -> rs.Network:
    """A network in which BOUNDARIES activation boundaries pass through each member."""
    generator, neurons = torch.Generator().manual_seed(0), BOUNDARIES * len(members)
    weight = torch.randn(neurons, COLUMNS, generator=generator).double()
    bias = -(weight * members.repeat(BOUNDARIES, 1)).sum(1)
    theta = {
        "layers.0.weight": weight,
        "layers.0.bias": bias,
        "layers.1.weight": torch.randn(1, neurons, generator=generator).double(),
        "layers.1.bias": torch.zeros(1).double(),
    }
    return rs.Network(theta, f"mlp:{COLUMNS}-{neurons}-1,bias=all,activation={activation}")


MEMBER_RECORDS, OTHER_RECORDS, REFERENCE = (
    draw_records(MEMBERS, 1),
    draw_records(MEMBERS, 2),
    draw_records(OTHERS, 3),
)
NETWORK = planted_network(MEMBER_RECORDS)
SMALL_NETWORK = planted_network(MEMBER_RECORDS[:3])


def remove(x: Tensor, *columns: tuple[int, ...]) -> Tensor:
    """Remove the cells of one group of columns from each record, taking the groups in turn."""
    partial = x.clone()
    for row in range(len(x)):
        partial[row, [*columns[row % len(columns)]]] = torch.nan
    return partial


def fill(
    partial: Tensor, network: rs.Network = NETWORK, columns: str | None = None
) -> FilledRecords:
    return rs.attacks.fill(
        network, rs.Knowledge(partial=partial, reference=REFERENCE, columns=columns)
    )


EVERY_VARIABLE = (*((column,) for column in range(CONTINUOUS)), GROUP, (BINARY,))


def test_values_of_members_are_filled_and_values_of_others_stay_empty() -> None:
    partial = torch.cat(
        [remove(MEMBER_RECORDS, *EVERY_VARIABLE), remove(OTHER_RECORDS, *EVERY_VARIABLE)]
    )
    filled = fill(partial)
    is_missing = partial.isnan()
    torch.testing.assert_close(filled.x[:MEMBERS], MEMBER_RECORDS, atol=1e-6, rtol=0)
    assert bool(filled.x[MEMBERS:].isnan().equal(is_missing[MEMBERS:]))
    assert bool(filled.is_filled[:MEMBERS].equal(is_missing[:MEMBERS]))
    assert float(filled.q[:MEMBERS].nan_to_num().max()) < 0.01
    assert float(filled.q[MEMBERS:].nan_to_num(nan=1.0).min()) > 0.05
    assert bool(filled.p.isfinite().equal(is_missing))
    # One-hot columns that are named and columns that are recognized give the same result.
    assert fill(partial, columns="6-8:onehot").x.nan_to_num().equal(filled.x.nan_to_num())


def test_two_values_of_a_record_are_inferred_together() -> None:
    records = torch.cat([MEMBER_RECORDS[:3], OTHER_RECORDS[:2]])
    filled = fill(remove(records, (0, 3)), SMALL_NETWORK)
    torch.testing.assert_close(filled.x[:3], MEMBER_RECORDS[:3], atol=1e-6, rtol=0)
    assert int(filled.is_filled[3:].sum()) == 0
    assert filled.p[0, 0] == filled.p[0, 3]  # one question


def test_a_few_records_need_a_smaller_error_rate() -> None:
    """A single record is filled by one value, and its p-value is its q."""
    filled = fill(remove(MEMBER_RECORDS[:1], (2,)))
    assert float(filled.x[0, 2]) == pytest.approx(float(MEMBER_RECORDS[0, 2]), abs=1e-6)
    assert filled.p[0, 2] == filled.q[0, 2] < 0.01
    # Records that were never trained on, one at a time. About 1% of the files should be filled.
    results = [
        fill(remove(OTHER_RECORDS[row : row + 1], (column,)), SMALL_NETWORK)
        for row in range(MEMBERS)
        for column in (0, 3)
    ]
    assert sum(int(result.is_filled.sum()) for result in results) <= 2
    assert 0.2 < sum(float(result.p.nansum()) for result in results) / len(results) < 0.8


def test_cells_that_cannot_be_inferred_stay_empty_with_a_reason() -> None:
    partial = remove(MEMBER_RECORDS[:5], (0, 1, 2, 3), (0, BINARY), (GROUP[0],), (), (0,))
    filled = fill(partial)
    texts = ("more than 3 values", "only be inferred alone", "only some columns of a group", "", "")
    for reason, text in zip(filled.reasons, texts, strict=True):
        assert text in reason if text else reason == ""
    assert filled.is_filled.sum(1).tolist() == [0, 0, 0, 0, 1]
    assert len(filled.notes) == 3
    constant = torch.cat([MEMBER_RECORDS[:2], REFERENCE])
    constant[:, 4] = 1.0
    constant[0, 4] = torch.nan
    reasons = rs.attacks.fill(NETWORK, rs.Knowledge(partial=constant)).reasons
    assert "only one value" in reasons[0]


def test_partial_records_need_no_reference_if_they_are_many() -> None:
    """Similar records lend their values, so a scale can be measured without a complete record."""
    partial = remove(torch.cat([MEMBER_RECORDS, OTHER_RECORDS, REFERENCE]), *EVERY_VARIABLE)
    assert not bool(partial.isfinite().all(1).any())
    borrowed = borrow_values(partial)
    assert bool(borrowed.isfinite().all())
    assert borrowed[partial.isfinite()].equal(partial[partial.isfinite()])
    assert bool((borrowed[:, GROUP[0] : BINARY].sum(1) == 1).all())
    filled = rs.attacks.fill(NETWORK, rs.Knowledge(partial=partial))
    assert int(filled.is_filled[:MEMBERS].any(1).sum()) == MEMBERS
    torch.testing.assert_close(filled.x[:MEMBERS], MEMBER_RECORDS, atol=1e-6, rtol=0)
    # At a false discovery rate of 5%, about one of 21 filled records is no member, and rarely four are.
    assert int(filled.is_filled[MEMBERS:].sum()) <= 4


def test_what_it_refuses() -> None:
    partial = remove(MEMBER_RECORDS, (0,))
    for knowledge, text in (
        (rs.Knowledge(), "pass --partial"),
        (rs.Knowledge(partial=MEMBER_RECORDS), "no value is missing"),
        (rs.Knowledge(partial=partial[:0]), "no value is missing"),
        (rs.Knowledge(partial=partial[:, 1:]), f"each of the {COLUMNS} inputs"),
        (rs.Knowledge(partial=partial / 0), "infinite"),
        (rs.Knowledge(partial=partial), f"at least {MIN_KNOWN} known values"),
    ):
        assert text in why_not(NETWORK, knowledge)
        with pytest.raises(InputError, match="does not apply"):
            rs.attacks.fill(NETWORK, knowledge)
    smooth = planted_network(MEMBER_RECORDS, "gelu")
    with pytest.raises(ArchitectureError, match="ReLU"):
        rs.attacks.fill(smooth, rs.Knowledge(partial=partial, reference=REFERENCE))


def test_partial_records_are_knowledge_with_a_source() -> None:
    partial = remove(MEMBER_RECORDS, (0,))
    knowledge = rs.Knowledge(
        partial=partial, reference=REFERENCE, provenance={"reference": "holdout"}
    )
    assert knowledge.line == "partial (user), reference (holdout)"
    other = knowledge.replace(partial=remove(MEMBER_RECORDS, (1,)))
    assert knowledge.digest != other.digest
