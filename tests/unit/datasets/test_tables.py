"""Tables of several formats are read alike, within limits, and other formats are named."""

from __future__ import annotations

import gzip
import json
import pickle
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from residuum.datasets.given import as_dataset, read_samples
from residuum.datasets.tables import make_column, read_table
from residuum.errors import DataError, InputError, MissingExtraError, UnsafeFileError
from residuum.records import Dataset

FRAME = pandas.DataFrame(
    {
        "age": [30.5, None, 50.25],
        "city": ["Porto, PT", "Graz; AT", ""],
        "smoker": [True, False, True],
        "label": ["ill", "well", "ill"],
    }
)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def check_frame(columns: Any) -> None:
    assert list(columns) == ["age", "city", "smoker", "label"]
    assert columns["age"][[0, 2]].tolist() == [30.5, 50.25]
    assert bool(columns["age"][1].isnan())
    assert columns["city"] == ("Porto, PT", "Graz; AT", "")
    assert columns["smoker"].tolist() == [1, 0, 1]
    assert columns["label"] == ("ill", "well", "ill")


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz"])
def test_the_delimiter_is_found_in_the_header(tmp_path: Path, separator: str, suffix: str) -> None:
    path = tmp_path / f"t{suffix}"
    FRAME.to_csv(path, sep=separator, index=False, encoding="utf-8-sig")
    check_frame(read_table(path))


def test_objects_of_json_are_rows(tmp_path: Path) -> None:
    FRAME.to_json(tmp_path / "t.json", orient="records")
    FRAME.to_json(tmp_path / "t.jsonl", orient="records", lines=True)
    check_frame(read_table(tmp_path / "t.json"))
    check_frame(read_table(tmp_path / "t.jsonl"))
    rows = [{"a": 1, "y": 0}, {"a": 2, "b": "late", "y": 1}]
    columns = read_table(write(tmp_path / "ragged.json", json.dumps(rows)))
    assert columns["b"] == ("", "late")


def test_a_parquet_table_is_read_or_the_package_is_named(tmp_path: Path) -> None:
    try:
        FRAME.to_parquet(tmp_path / "t.parquet")
    except ImportError:
        (tmp_path / "t.parquet").write_bytes(b"PAR1")
        with pytest.raises(MissingExtraError, match=r"pyarrow.*to_csv"):
            read_table(tmp_path / "t.parquet")
    else:
        check_frame(read_table(tmp_path / "t.parquet"))


def test_decimal_commas_are_numbers_if_another_delimiter_is_used(tmp_path: Path) -> None:
    columns = read_table(write(tmp_path / "t.csv", "a;b;y\n1,5;x,y;1\n-2,25e1;z;0\n"))
    assert columns["a"].tolist() == [1.5, -22.5]
    assert columns["b"] == ("x,y", "z")


@pytest.mark.parametrize(
    ("name", "values", "numbers"),
    [
        ("a", ["1", " 2.5", "-3e2"], [1.0, 2.5, -300.0]),
        ("a", ["true", "FALSE"], [1.0, 0.0]),
        ("a", ["1", "none"], [1.0, None]),
        ("zip", ["007", "12"], [7.0, 12.0]),
        ("id", ["007", "12"], None),  # leading zeros belong to an identifier
        ("a", ["12345678901234567", "1"], None),  # a float would change the last digits
        ("a", ["NA", "EU"], None),
        ("a", [None, 2, True], [None, 2.0, 1.0]),
        ("a", [pandas.NaT, "x"], None),
    ],
)
def test_a_column_holds_numbers_or_texts(
    name: str, values: list[Any], numbers: list[float | None] | None
) -> None:
    column = make_column(name, values)
    if numbers is None:
        assert column == tuple("" if value is pandas.NaT else value for value in values)
    else:
        assert isinstance(column, torch.Tensor)
        assert [None if v != v else v for v in column.tolist()] == numbers


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "a,b\n1,2\n3\n", "line 3 has 1 values"),
        ("t.csv", "a,b\n", "no rows"),
        ("t.csv", "a,a\n1,2\n", "two columns named 'a'"),
        ("t.csv", f'a,b\n"{"x" * 200_000}",1\n', "field larger"),
        ("t.json", '{"a": 1}', "list of objects"),
        ("t.json", "[" * 100_000, "reading the file failed"),
        ("t.jsonl", '{"a": [1, 2]}\n', "must hold only single values"),
        ("t.jsonl", '{"a": \n', "reading the file failed"),
        ("t.csv.gz", "no gzip", "reading the file failed"),
    ],
)
def test_files_that_are_no_table_are_refused(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_samples(write(tmp_path / name, text))


def test_small_files_with_large_tables_are_refused(tmp_path: Path) -> None:
    member = gzip.compress(b"a,b\n" + b"1,2\n" * 250_000)
    (tmp_path / "t.csv.gz").write_bytes(member * 300)
    with pytest.raises(UnsafeFileError, match="bytes"):
        read_table(tmp_path / "t.csv.gz")
    other_keys = json.dumps([{f"k{i}": 1} for i in range(8000)])
    with pytest.raises(UnsafeFileError, match="60,000,000 values"):
        read_table(write(tmp_path / "t.json", other_keys))


def test_an_npy_array_holds_samples_without_labels(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12, dtype=np.uint8).reshape(4, 3))
    dataset = read_samples(tmp_path / "x.npy")[0]
    assert dataset.x.tolist() == np.arange(12).reshape(4, 3).tolist()
    assert not dataset.y.any()
    header = {"descr": "<f8", "fortran_order": False, "shape": (10**12, 8)}
    with (tmp_path / "claims.npy").open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
    np.save(tmp_path / "objects.npy", np.array([[Dataset]]), allow_pickle=True)
    (tmp_path / "empty.npy").touch()
    np.save(tmp_path / "texts.npy", np.array([["a"]]))
    for name in ("claims", "objects", "empty", "texts", "missing"):
        with pytest.raises(DataError):
            read_samples(tmp_path / f"{name}.npy")


def test_other_formats_are_named_with_the_command_that_converts_them(tmp_path: Path) -> None:
    path = tmp_path / "it's people.pkl"
    FRAME.to_pickle(path)
    with pytest.raises(DataError, match=r"has the format \.pkl.*can run code") as problem:
        read_samples(path)
    command = problem.value.remedy.partition("convert it: ")[2]
    subprocess.run([sys.executable, *shlex.split(command)[1:]], check=True, timeout=60)
    check_frame(read_table(path.with_suffix(".csv")))
    for name in ("t.xlsx", "t.feather", "t.h5"):
        with pytest.raises(DataError, match=r"python -c .*pandas\.read_"):
            read_samples(write(tmp_path / name, ""))
    (tmp_path / "x.bin").write_bytes(pickle.dumps([1]))
    with pytest.raises(DataError, match="is none of these"):
        read_samples(tmp_path / "x.bin")


def test_only_tables_have_a_label_column(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=np.ones((3, 2)), y=np.ones(3))
    with pytest.raises(InputError, match="--label and --drop"):
        read_samples(tmp_path / "t.npz", label="y")
    with pytest.raises(InputError, match="no named columns"):
        as_dataset((np.ones((3, 2)), np.ones(3)), "data", drop=("a",))
