"""The label, the record IDs and the inputs of a model are chosen among the columns of a table."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
import torch

from residuum.datasets.columns import check_columns, fit_columns
from residuum.datasets.given import as_dataset
from residuum.errors import DataError
from residuum.records import Dataset

N = 6
PEOPLE = pandas.DataFrame(
    {
        "patient_id": [f"P{i}" for i in range(N)],
        "visit": range(100, 100 + N),
        "age [years]": [30.0, 41, 52, 30, 60, 71],
        "weight": [70.0, 81, 92, 60, 71, 55],
        "city": ["Porto", "Graz", "Porto", "Lyon", "Graz", "Lyon"],
        "diagnosis": ["ill", "well"] * (N // 2),
    }
)


def people(**roles: object) -> Dataset:
    return as_dataset(PEOPLE, "people", **roles)


def inputs(dataset: Dataset | None) -> tuple[str, ...]:
    assert dataset is not None
    assert dataset.table is not None
    assert dataset.x.shape == (len(dataset), len(dataset.table.inputs))
    return dataset.table.inputs


def test_texts_and_record_ids_are_no_inputs() -> None:
    dataset = people()
    assert inputs(dataset) == ("visit", "age [years]", "weight")
    assert (dataset.features, dataset.units) == (("visit", "age", "weight"), ("", "years", ""))
    assert dataset.record_ids == tuple(PEOPLE["patient_id"])
    assert (dataset.classes, dataset.y.tolist()) == (("ill", "well"), [0, 1] * 3)
    assert dict(dataset.table.texts) == {
        name: tuple(PEOPLE[name]) for name in ("patient_id", "city")
    }
    assert any("'city'" in note and "text" in note for note in dataset.notes)


def test_the_number_of_inputs_decides_about_row_numbers() -> None:
    assert inputs(fit_columns(people(), None, 2)[0]) == ("age [years]", "weight")
    assert inputs(fit_columns(people(), None, 3)[0]) == ("visit", "age [years]", "weight")
    frame = PEOPLE.assign(id=range(N)).drop(columns="patient_id")
    numbered = as_dataset(frame, "people")
    assert inputs(numbered) == ("visit", "age [years]", "weight")
    restored = fit_columns(numbered, None, 4)[0]
    assert inputs(restored) == ("visit", "age [years]", "weight", "id")
    assert restored is not None
    assert restored.record_ids == ()


def test_the_user_names_the_label_and_excludes_columns() -> None:
    dataset = people(label="weight", drop=("visit", "city"))
    assert inputs(dataset) == ("age [years]",)
    assert dataset.y.tolist() == PEOPLE["weight"].tolist()
    assert dataset.table is not None
    assert dataset.table.input_texts == ("diagnosis",)
    assert "city" in dataset.table.texts  # still searched for in a release
    for roles in ({"label": "wieght"}, {"drop": ("wieght",)}):
        with pytest.raises(DataError, match="Did you mean 'weight'"):
            people(**roles)


def test_a_last_column_that_identifies_the_rows_is_no_label() -> None:
    names = [f"name {i}" for i in range(N)]
    dataset = as_dataset(pandas.DataFrame({"a": np.ones(N), "who": names}), "t")
    assert inputs(dataset) == ("a",)
    assert not dataset.y.any()
    assert "no column of 't' is the label" in dataset.notes[0]
    constant = as_dataset(pandas.DataFrame({"a": np.ones(N), "what": ["dog"] * N}), "t")
    assert (constant.classes, constant.y.tolist()) == (("dog",), [0] * N)


def test_an_index_that_pandas_wrote_is_no_input() -> None:
    frame = pandas.DataFrame({"": range(N), "a": np.ones(N), "y": [0, 1] * 3})
    assert inputs(as_dataset(frame, "t")) == ("a",)
    shuffled = frame.assign(**{"": [3, 1, 2, 0, 5, 4]})
    assert inputs(as_dataset(shuffled, "t")) == ("", "a")


def test_held_out_tables_have_the_columns_and_classes_of_the_training_samples() -> None:
    held_out = PEOPLE[["weight", "diagnosis", "age [years]", "visit"]].iloc[1::2]
    train, holdout = fit_columns(people(), as_dataset(held_out, "holdout", is_holdout=True), 3)
    assert inputs(holdout) == inputs(train)
    assert train is not None
    assert holdout is not None
    assert torch.equal(holdout.x, train.x[1::2])
    assert holdout.y.tolist() == [1, 1, 1]  # "well" is class 1, although "ill" does not occur
    check_columns(train, holdout, 3)
    without_weight = as_dataset(held_out.drop(columns="weight"), "holdout")
    with pytest.raises(DataError, match="'holdout' has 2 columns of numbers"):
        check_columns(*fit_columns(people(), without_weight, 3), 3)
    with pytest.raises(
        DataError, match=r"'weight' of the table 'people' is missing in the table 'holdout'"
    ):
        check_columns(*fit_columns(people(drop=("city",)), without_weight))


def test_row_numbers_are_kept() -> None:
    subset = people().take(torch.tensor([4, 1]))
    fitted = fit_columns(subset, None, 2)[0]
    assert fitted is not None
    assert fitted.rows == [4, 1]
    assert fitted.x.tolist() == [[60, 71], [41, 81]]
    assert fitted.record_ids == ("P4", "P1")


@pytest.mark.parametrize(
    ("frame", "input_count", "message"),
    [
        (PEOPLE, None, r"'city' holds text.*--drop city"),
        (PEOPLE, 5, r"the 5 inputs of the model.*Encode the columns of text"),
        (PEOPLE, 1, r"the 1 inputs of the model.*--drop visit --drop 'age \[years\]'"),
        (PEOPLE[["city", "diagnosis"]], None, "must be numbers"),
        (
            PEOPLE.assign(weight=[1, 2, None, 4, np.inf, 6]),
            3,
            r"has 2 such values in 'weight', the first in row 2 .*--drop weight",
        ),
        (PEOPLE.assign(y=[0.5, None, 1, 2, 3, 4]), 3, r"column 'y' .* is missing in row 1"),
    ],
)
def test_tables_that_a_model_cannot_receive_are_refused(
    frame: pandas.DataFrame, input_count: int | None, message: str
) -> None:
    train, _ = fit_columns(as_dataset(frame, "people"), None, input_count)
    with pytest.raises(DataError, match=message):
        check_columns(train, None, input_count)


def test_a_model_that_takes_texts_gets_the_whole_table() -> None:
    names = ("city", "age [years]", "patient_id")
    train, holdout = fit_columns(people(), people(), None, names)
    assert inputs(train) == names
    check_columns(train, holdout, 3)
    assert train is not None
    assert holdout is not None
    assert torch.equal(train.x, holdout.x)  # equal texts have equal numbers
    same_city = train.x[:, None, 0] == train.x[None, :, 0]
    cities = PEOPLE["city"].to_numpy()
    assert same_city.tolist() == (cities[:, None] == cities[None]).tolist()
    assert not train.x[:, 2].any()  # identifiers do not distinguish samples
