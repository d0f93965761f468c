"""Values of text columns in the strings of a file, compared with values that only the held-out table has."""

from __future__ import annotations

import pickle
from pathlib import Path

import pandas
import pytest
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder

import residuum as rs

NAMES = [
    f"{first}{last}"
    for first in ("Ander", "Bran", "Cole")
    for last in ("son", "wick", "ton", "berg")
]
OTHERS = [f"{name}i" for name in NAMES]


def table(names: list[str]) -> pandas.DataFrame:
    return pandas.DataFrame(
        {"surname": names * 3, "age": range(len(names) * 3), "label": [0, 1, 1] * len(names)}
    )


def scan_encoder(encoder: object, path: Path, holdout: pandas.DataFrame) -> list[str]:
    """Save an encoder and return the findings about the column of surnames."""
    path.write_bytes(pickle.dumps(encoder))
    findings = rs.scan(path, data=table(NAMES), holdout=holdout).findings
    return [f"{f.severity}: {f.what}" for f in findings if "column surname" in f.what]


@pytest.mark.parametrize("kind", [OneHotEncoder, OrdinalEncoder])
def test_names_in_an_encoder_are_reported_with_their_column(kind: type, tmp_path: Path) -> None:
    encoder = kind().fit(table(NAMES)[["surname"]])
    what = scan_encoder(encoder, tmp_path / "e.pkl", table(OTHERS))
    assert what == ["high: 12 of 12 values of column surname"]


def test_names_of_other_people_are_not_reported(tmp_path: Path) -> None:
    encoder = OneHotEncoder().fit(table(OTHERS)[["surname"]])
    assert scan_encoder(encoder, tmp_path / "e.pkl", table(OTHERS)) == []
    assert scan_encoder(encoder, tmp_path / "e.pkl", table([f"{n}x" for n in NAMES])) == []


def test_values_that_held_out_records_explain_are_not_reported(tmp_path: Path) -> None:
    encoder = OneHotEncoder().fit(table([*NAMES, *OTHERS])[["surname"]])
    assert scan_encoder(encoder, tmp_path / "e.pkl", table(OTHERS)) == []
