"""How a test of attributes describes values and counts, and when it is a finding."""

from __future__ import annotations

from residuum.records.attribute_test import MIN_RECORDS, AttributeTest, DisclosedCell

CELL = DisclosedCell(3, (1,), (4.25,), (4.2501,), (3.0,), 0.01, ("income",), "EUR")
CITY = DisclosedCell(
    5, (2, 3), (0.0, 1.0), (1.0, 0.0), (0.0, 1.0), 0.02, ("city_Graz", "city_Lyon")
)
FINDING = AttributeTest(
    60, 10, 0.05, reported=40, right=38, imputable=8, rows=(1, 5, 9), holdout_cells=600
)


def test_values_are_shown_with_the_name_of_their_column() -> None:
    assert CELL.column == "income"
    assert CELL.texts == ("4.25", "4.2501", "3")
    assert CELL.replace(names=()).column == "column 1"


def test_one_hot_values_are_shown_as_choices() -> None:
    assert CITY.column == "city"
    assert CITY.texts == ("Lyon", "Graz", "Lyon")
    without_names = CITY.replace(names=())
    assert without_names.column == "column 2, column 3"
    assert without_names.texts == ("column 3", "column 2", "column 3")
    assert CITY.replace(names=("Graz", "Lyon")).column == "Graz, Lyon"


def test_a_finding_needs_records_and_a_clean_control() -> None:
    assert FINDING.is_finding
    assert FINDING.disclosed_count == 30
    assert not FINDING.replace(rows=FINDING.rows[: MIN_RECORDS - 1]).is_finding
    assert FINDING.replace(holdout_reported=2).is_finding  # 5% of 40 reported cells
    assert not FINDING.replace(holdout_reported=3).is_finding
    assert not AttributeTest(60, reason="there are no columns").is_finding


def test_the_line_counts_records_errors_and_controls() -> None:
    assert FINDING.line == (
        "For 3 of your 60 records, an attacker who knows the other columns can infer a missing value. "
        "At a false discovery rate of 5%, 40 of 600 values are reported. Of these, 2 are wrong and 8 can be "
        "predicted without the network. As a control, 0 of 600 values of held-out records are reported."
    )
    assert FINDING.short_line == (
        "For 3 of your 60 records, an attacker who knows the other columns can infer a missing value. "
        "Of 40 reported values, 2 are wrong. Of 600 values of held-out records, 0 are reported."
    )
    few = FINDING.replace(rows=(1,))
    assert few.short_line == "1 of 60 records have a value that can be inferred."
    assert "40 other records were not tested" in FINDING.replace(untested=40).line
    not_tested = AttributeTest(60, reason="there are no columns")
    assert not_tested.line == "Attributes were not tested: there are no columns."
