"""Write the schemas of a log line and of `--json` from the classes of records and reports.

`python docs/write_schema.py` writes `src/anybatch/events/schema.json` and `src/anybatch/cli/schema.json`, for readers
in other languages; tests compare them with the classes.

**Readers ignore unknown content.** Within a version, kinds and fields may be added, so a line with an unknown kind or
unknown fields is valid. A changed meaning of a field needs a new version, and readers skip lines of unknown versions.
"""

import dataclasses
import enum
import importlib
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import anybatch.cli
import anybatch.events
from anybatch.cli.command import json_names
from anybatch.core.records import Record
from anybatch.events.log_lines import SCHEMA_VERSION

SCHEMA_PATH = Path(anybatch.events.__file__).with_name("schema.json")
RESULTS_PATH = Path(anybatch.cli.__file__).with_name("schema.json")
RESULTS = {
    "train": ("anybatch.recipes.session:SessionResult",),
    "plan": ("anybatch.planner.plan:PlanValues",),
    "check": ("anybatch.diagnostics.check_report:CheckReport", "anybatch.diagnostics.loop_check.report:LoopReport"),
    "tune": ("anybatch.diagnostics.tune:TuneReport",),
    "compare": ("anybatch.diagnostics.compare:ComparisonReport",),
    "scale": ("anybatch.diagnostics.scale:ScaleReport", "anybatch.planner.forecast_report:ForecastReport"),
    "advise": ("anybatch.diagnostics.advise:Advice",),
    "spikes": ("anybatch.diagnostics.spike_log:SpikeReport",),
    "trace": ("anybatch.events.chrome_trace:TraceReport",),
    "memory": ("anybatch.diagnostics.memory_report:MemoryReport",),
    "demo": ("anybatch_guide.demo.run:DemoReport",),
    "init": ("anybatch.cli.init:WrittenRecipe",),
    "env": ("anybatch.cli.env:Environment",),
}
"""The classes of each command's results."""

Schema = dict[str, Any]

_JSON_TYPES = types.MappingProxyType(
    {int: "integer", bool: "boolean", str: "string", Path: "string", types.NoneType: "null"}
)


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
    return summary, _entries(attributes)


def _entries(section: str) -> dict[str, str]:
    """Return the descriptions in a section of a docstring, such as "Attributes"."""
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", section, re.MULTILINE)
    # The schema is for readers in other languages, which use null.
    return {name: re.sub(r"\bNone\b", "null", " ".join(text.split())) for name, text in entries}


def results_schema() -> Schema:
    """Return the JSON Schema of the output of `--json`: a definition for each command, for errors, and for reports."""
    reports = {name: [_class(path) for path in paths] for name, paths in RESULTS.items()}
    # The definition of a class appears once, although several reports use it.
    parts = {part.__name__: part for kinds in reports.values() for kind in kinds for part in _dataclasses_in(kind)}
    errors = {"type": "object", "properties": {key: {"type": "string"} for key in ("type", "code", "message")}}
    status = {"type": "integer", "description": "exit status of the command, as in docs/command_line.md"}
    failed = {"verb": {"type": "string"}, "status": {**status, "not": {"const": 0}}, "error": errors}
    commands = {
        name: {
            "type": "object",
            "properties": {"verb": {"const": name}, "status": status},
            "required": ["verb", "status"],
            "oneOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in kinds],
        }
        for name, kinds in reports.items()
    }
    number = {"type": ["number", "null"], "description": "a number; null if it is not finite"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:anybatch:results:1",
        "title": "The output of an anybatch command with --json",
        "description": "Ignore unknown fields.",
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in (*commands, "error")],
        "$defs": {
            **commands,
            "error": {"type": "object", "properties": failed, "required": list(failed)},
            **{name: _report_schema(part) for name, part in sorted(parts.items())},
            "number": number,
        },
    }


def _class(path: str) -> type:
    module, _, name = path.partition(":")
    kind: type = getattr(importlib.import_module(module), name)
    return kind


def _hints_of(kind: type) -> dict[str, object]:
    """Return the types of a report's fields and properties that are part of its JSON."""
    fields = typing.get_type_hints(kind)
    names = json_names(kind)
    return {n: fields[n] if n in fields else typing.get_type_hints(getattr(kind, n).fget)["return"] for n in names}


def _dataclasses_in(hint: object, seen: frozenset[object] = frozenset()) -> Iterator[type]:
    """Yield the dataclasses in a type, and in the fields of these."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint not in seen:
        yield hint
        for inner in _hints_of(hint).values():
            yield from _dataclasses_in(inner, seen | {hint})
    for argument in typing.get_args(hint):
        yield from _dataclasses_in(argument, seen)


def _report_schema(kind: type) -> Schema:
    hints = _hints_of(kind)
    comments = re.findall(r"^    (\w+): [^#\n]*  # (.+)$", inspect.getsource(kind), re.MULTILINE)
    docstrings = {name: vars(kind)[name].__doc__ or "" for name in hints if isinstance(vars(kind).get(name), property)}
    texts = {**_entries(inspect.getdoc(kind) or ""), **dict(comments), **docstrings}
    properties: dict[str, Schema] = {}
    for name, hint in hints.items():
        text = re.sub(r"\bNone\b", "null", texts.get(name, "").partition("\n")[0])
        properties[name] = {**_type_schema(hint), **({"description": text} if text else {})}
    summary = (inspect.getdoc(kind) or "").partition("\n")[0]
    return {"type": "object", "description": summary, "properties": properties, "required": list(hints)}


def _type_schema(hint: object) -> Schema:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (Mapping, dict):
        return {"type": "object", "additionalProperties": _type_schema(arguments[1])}
    if origin in (tuple, list, frozenset):
        kinds = tuple(dict.fromkeys(kind for kind in arguments if kind is not ...))
        return {"type": "array", "items": _union_schema(kinds)}
    if origin in (types.UnionType, typing.Union):
        return _union_schema(arguments)
    return _class_schema(hint)


def _class_schema(kind: object) -> Schema:
    if kind in _JSON_TYPES:
        return {"type": _JSON_TYPES[typing.cast("type", kind)]}
    if kind is float:
        return {"$ref": "#/$defs/number"}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if isinstance(kind, enum.EnumType):
        return {"enum": [member.value for member in typing.cast("type[enum.Enum]", kind)]}
    message = f"a field has the type {kind}, for which there is no JSON type."
    raise TypeError(message)


def _union_schema(members: tuple[object, ...]) -> Schema:
    """Return the schema of a union; a tensor in the union stands for its number or boolean."""
    if torch.Tensor not in members:
        kinds = [_type_schema(member) for member in members]
        return {"anyOf": kinds} if len(kinds) > 1 else kinds[0]
    scalar = "flag" if bool in members else "number"
    return {"$ref": f"#/$defs/{scalar}"}  # both allow null


if __name__ == "__main__":
    SCHEMA_PATH.write_text(schema_text(), encoding="utf-8")
    RESULTS_PATH.write_text(json.dumps(results_schema(), indent=2) + "\n", encoding="utf-8")
