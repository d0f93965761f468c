"""The JSON Schemas in the package are those that the records give, and they say enough to refuse nonsense."""

from __future__ import annotations

import dataclasses
import inspect
import json
from importlib.resources import files
from typing import Any

import jsonschema
import pytest

from residuum.auditing.comparing import Comparison
from residuum.auditing.questions import Answer
from residuum.auditing.verdict import EXIT_CODES, OUTCOMES, Verdict
from residuum.records import Record
from residuum.records.published import published_form
from residuum.scanning.findings import KINDS
from residuum.schemas import derive_schemas
from tests.schemas import schema

NAMES = ["comparison", "dry-run", "exposure", "result", "scan"]


def test_the_files_are_what_the_records_give() -> None:
    """After a record changed: `python -m residuum.schemas`."""
    folder = files("residuum").joinpath("schemas")
    stored = {
        file.name: file.read_text("utf-8")
        for file in folder.iterdir()
        if file.name.endswith("json")
    }
    assert stored == derive_schemas()


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_a_schema_with_a_version(name: str) -> None:
    document = schema(name)
    jsonschema.Draft202012Validator.check_schema(document)
    kind, version = document["$id"].removeprefix("urn:residuum:").split(":")
    assert kind == name
    assert float(version) >= 1
    assert document["additionalProperties"] is False
    stated = document["properties"].get("schema_version")
    assert stated is None or stated["enum"] == [version]


def test_choices_and_limits_of_the_records_are_in_the_schema() -> None:
    verdict = schema("result")["$defs"]["Verdict"]["properties"]
    assert verdict["outcome"]["enum"] == [*OUTCOMES]
    assert {*OUTCOMES} == {*EXIT_CODES}
    assert {*verdict["exit_code"]["enum"]} == {*EXIT_CODES.values()}
    assert (verdict["significance"]["minimum"], verdict["significance"]["maximum"]) == (0, 1)
    assert schema("scan")["$defs"]["Finding"]["properties"]["kind"]["enum"] == [*KINDS]
    exposure = schema("exposure")
    assert {"request", "environment"} == {*exposure["properties"]} - {*exposure["required"]}


def test_the_form_of_a_record_is_its_json() -> None:
    verdict = Verdict(
        "leak",
        ("why",),
        answers=(Answer("stored", "Are training records stored in the file?", "yes", "They are."),),
        grade="near-copy",
        grades={"near-copy": 6},
        n=20,
        recovered=6,
        interval=(2.0, 9.0),
        p_value=0.002,
    )
    values = verdict.to_json()
    published_form(Verdict).model_validate(values)
    assert (values["exit_code"], values["interval"]) == (1, [2.0, 9.0])
    for wrong in ({"extra": 1}, {"outcome": 3}, {"n": "many"}):
        with pytest.raises(ValueError, match="validation error"):
            published_form(Verdict).model_validate(values | wrong)
    for name in values:
        with pytest.raises(ValueError, match="Field required"):
            published_form(Verdict).model_validate({k: v for k, v in values.items() if k != name})


@dataclasses.dataclass(frozen=True, eq=False)
class Inner(Record):
    """One part."""

    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class Outer(Record):
    """Parts in every kind of container."""

    derived = ("count",)

    inner: Inner | None
    several: tuple[Inner, ...]
    named: dict[str, Inner]
    anything: dict[str, Any]

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.several)


def test_records_inside_records_have_one_definition_each() -> None:
    record = Outer(Inner(1), (Inner(2), Inner(3)), {"a": Inner(4)}, {"b": [1, None]})
    values = record.to_json()
    assert values == {
        "inner": {"size": 1},
        "several": [{"size": 2}, {"size": 3}],
        "named": {"a": {"size": 4}},
        "anything": {"b": [1, None]},
        "count": 2,
    }
    form = published_form(Outer)
    form.model_validate(values)
    assert [*form.model_json_schema()["$defs"]] == ["Inner"]
    with pytest.raises(ValueError, match="validation error"):
        form.model_validate(values | {"several": [{"size": 2, "more": 1}]})


def test_a_number_that_is_not_finite_is_null_in_json() -> None:
    assert (
        json.dumps(Outer(None, (), {}, {"b": float("nan")}).to_json()["anything"]) == '{"b": null}'
    )


def test_the_docstring_of_a_record_describes_its_json() -> None:
    text, published = inspect.getdoc(Comparison) or "", schema("comparison")
    assert published["description"] == text.partition("\n")[0]
    for name, field in published["properties"].items():
        assert f"    {name}: {field['description']}" in text
