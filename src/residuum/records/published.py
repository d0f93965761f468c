"""JSON Schemas of records: the keys of their JSON objects and the types of the values.

The keys are the fields of a record, except those that its class lists in ``unpublished``, and the properties
that its class lists in ``derived``. The JSON Schemas in ``residuum/schemas`` are derived from the classes of
the records, so that the fields of a record are listed only once. The section ``Attributes:`` of the docstring
of a class describes its fields in the schema.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections import ChainMap
from functools import cache, reduce
from importlib.metadata import version
from operator import or_
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from residuum.records.base import Record

if TYPE_CHECKING:
    from pydantic import BaseModel

DIALECT = "https://json-schema.org/draft/2020-12/schema"
OPTIONAL = {"optional": True}  # metadata of a field whose key may be missing


class SchemaRule:
    """Keywords of a JSON Schema that restrict a value in addition to its type, such as ``minimum=0``."""

    def __init__(self, **keywords: Any) -> None:
        self.keywords = keywords

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        """Add the keywords of this rule to the JSON Schema of a type. Pydantic calls this method."""
        return {**handler(core_schema), **self.keywords}


Count = Annotated[int, SchemaRule(minimum=0)]
Share = Annotated[float, SchemaRule(minimum=0, maximum=1)]


@dataclasses.dataclass(frozen=True, eq=False)
class Tool(Record):
    """Name and version of the program that wrote a file."""

    name: str
    version: str


def this_tool() -> Tool:
    """Return the name and the version of this program."""
    return Tool("residuum", version("residuum"))


@cache
def published_form(record: type[Record]) -> type[BaseModel]:
    """Return a pydantic model that validates the JSON object of a record and refuses unknown keys.

    Args:
        record: The class of the record.

    Returns:
        A model that validates what ``Record.to_json`` returns.
    """
    from pydantic import ConfigDict, create_model

    type_hints = get_type_hints(record, include_extras=True)
    descriptions = ChainMap(*(_documentation(base)[1] for base in record.__mro__))
    keys: dict[str, Any] = {}
    for field in record.published_fields():
        default = None if field.metadata.get("optional") else ...
        field_type = _published_type(type_hints[field.name])
        if field.name in descriptions:
            field_type = Annotated[field_type, SchemaRule(description=descriptions[field.name])]
        keys[field.name] = (field_type, default)
    for name in record.derived:
        return_type = get_type_hints(getattr(record, name).fget, include_extras=True)["return"]
        keys[name] = (_published_type(return_type), ...)
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    model: type[BaseModel] = create_model(
        record.__name__, __config__=model_config, __doc__=_documentation(record)[0], **keys
    )
    return model


def json_schema(record: type[Record], name: str, schema_version: str) -> dict[str, Any]:
    """Return the JSON Schema of a record.

    Args:
        record: The class of the record.
        name: Name of the result that the JSON contains, such as ``scan``.
        schema_version: Version of the schema.

    Returns:
        The schema, with an identifier made of name and version.
    """
    # mypy does not accept a class as the argument of a cached function, although classes are hashable.
    schema = published_form(record).model_json_schema()  # type: ignore[arg-type]
    return {"$schema": DIALECT, "$id": f"urn:residuum:{name}:{schema_version}", **schema}


def _documentation(record: type[Record]) -> tuple[str, dict[str, str]]:
    """Return the text of the docstring of a record, and the descriptions in its section ``Attributes:``."""
    text, _, section = inspect.cleandoc(record.__doc__ or "").partition("\nAttributes:\n")
    attribute_entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return text, {name: " ".join(description.split()) for name, description in attribute_entries}


def _published_type(annotation: Any) -> Any:
    """Replace each record class in a type by the pydantic model of the JSON object of that record."""
    if isinstance(annotation, type) and issubclass(annotation, Record):
        # mypy does not accept a class as the argument of a cached function, although classes are hashable.
        return published_form(annotation)  # type: ignore[arg-type]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if not arguments or origin is Literal:
        return annotation
    if origin is Annotated:
        return Annotated[(_published_type(arguments[0]), *arguments[1:])]
    inner_types = tuple(_published_type(argument) for argument in arguments)
    return reduce(or_, inner_types) if origin in (Union, UnionType) else origin[inner_types]
