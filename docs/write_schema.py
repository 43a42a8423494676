"""Write the schema of a log line from the record classes: `python docs/write_schema.py`.

The schema, `src/anybatch/events/schema.json`, is for readers in other languages; a test compares the two.

**Readers ignore unknown content.** Within a version, kinds and fields may be added, so a line with an unknown kind or
unknown fields is valid. A changed meaning of a field needs a new version, and readers skip lines of unknown versions.
"""

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import anybatch.events
from anybatch.core.records import Record
from anybatch.events.log_lines import SCHEMA_VERSION

SCHEMA_PATH = Path(anybatch.events.__file__).with_name("schema.json")

Schema = dict[str, Any]

_JSON_TYPES = types.MappingProxyType({int: "integer", bool: "boolean", str: "string", types.NoneType: "null"})


def json_schema() -> Schema:
    """Return the JSON Schema (draft 2020-12) of a line: a definition for each kind of record and for unknown kinds."""
    records: tuple[type[Record], ...] = typing.get_args(Record)
    kinds = [record.kind for record in records]
    unknown = {
        "type": "object",
        "description": "A kind of record that a later version added. Ignore it.",
        "properties": {**_envelope(), "kind": {"type": "string", "not": {"enum": kinds}}},
        "required": [*_envelope(), "kind"],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:anybatch:events:{SCHEMA_VERSION}",
        "title": "One line of an anybatch log",
        "description": "Ignore unknown kinds and unknown fields; skip lines of other versions.",
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in (*kinds, "unknown")],
        "$defs": {
            **{record.kind: _record_schema(record) for record in records},
            "unknown": unknown,
            "number": {
                "anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}, {"type": "null"}],
                "description": "a number; NaN and infinities are strings that Python's float() and JavaScript's "
                "Number() read, because JSON lacks them; null if the number could not be read from its device",
            },
            "flag": {
                "type": ["boolean", "null"],
                "description": "a boolean; null if it could not be read from its device",
            },
        },
    }


def schema_text() -> str:
    """Return the schema as the text of `schema.json`."""
    return json.dumps(json_schema(), indent=2) + "\n"


def _envelope() -> Schema:
    return {
        "version": {"const": SCHEMA_VERSION, "description": "version of this schema"},
        "sequence": {
            "type": "integer",
            "minimum": 0,
            "description": "number of the line in its log, from 0; a resumed run continues the numbering",
        },
        "time_seconds": {
            "type": "number",
            "description": "time at which the record arrived, in seconds on a monotonic clock with an arbitrary zero: "
            "compare only times after the same start record",
        },
    }


def _record_schema(record: type[Record]) -> Schema:
    summary, descriptions = _described(record)
    hints = typing.get_type_hints(record)
    fields = {
        field.name: {**_type_schema(hints[field.name]), "description": descriptions[field.name]}
        for field in dataclasses.fields(record)
    }
    properties = {**_envelope(), "kind": {"const": record.kind}, **fields}
    # A log always writes every field, so readers need not check whether it exists.
    return {"type": "object", "description": summary, "properties": properties, "required": list(properties)}


def _described(record: type[Record]) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a record's docstring, and the description of each of its attributes."""
    summary, _, attributes = (inspect.getdoc(record) or "").partition("\n\nAttributes:\n")
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", attributes, re.MULTILINE)
    # The schema is for readers in other languages, which use null.
    return summary, {name: re.sub(r"\bNone\b", "null", " ".join(text.split())) for name, text in entries}


def _type_schema(hint: object) -> Schema:
    if hint is float:
        return {"$ref": "#/$defs/number"}
    if isinstance(hint, type) and hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1])}
    if origin is tuple:
        return {"type": "array", "items": _type_schema(arguments[0])}
    if origin in (types.UnionType, typing.Union):
        return _union_schema(arguments)
    message = f"a record field has the type {hint}, for which there is no JSON type."
    raise TypeError(message)


def _union_schema(members: tuple[object, ...]) -> Schema:
    """Return the schema of a union; a tensor in the union stands for its number or boolean."""
    if torch.Tensor not in members:
        return {"anyOf": [_type_schema(member) for member in members]}
    scalar = "flag" if bool in members else "number"
    return {"$ref": f"#/$defs/{scalar}"}  # both allow null


if __name__ == "__main__":
    SCHEMA_PATH.write_text(schema_text(), encoding="utf-8")
