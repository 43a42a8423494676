"""The JSON schema is generated from the record classes."""

import dataclasses
from pathlib import Path
from typing import get_args

import jsonschema
import pytest

from anybatch.core.records import Record
from anybatch.events.schema import SCHEMA_PATH, SCHEMA_VERSION, json_schema, schema_text, write_schema

KINDS = get_args(Record)
ENVELOPE = {"version": SCHEMA_VERSION, "sequence": 0, "time_seconds": 0.5}
END = {**ENVELOPE, "kind": "end", "rank": 0, "status": "completed", "num_steps": 3, "message": None, "digest": None}


def is_valid(line: object) -> bool:
    """Return whether a line fits the schema."""
    return bool(jsonschema.Draft202012Validator(json_schema()).is_valid(line))


def test_the_committed_schema_is_the_generated_one(tmp_path: Path) -> None:
    """The committed schema.json matches the record classes."""
    assert SCHEMA_PATH.read_text(encoding="utf-8") == schema_text(), "run anybatch.events.schema.write_schema()"
    write_schema(tmp_path / "schema.json")
    assert (tmp_path / "schema.json").read_text(encoding="utf-8") == schema_text()


@pytest.mark.parametrize("record", KINDS)
def test_every_field_is_described(record: type[Record]) -> None:
    """Each kind has a description, and each field a type and a description in JSON terms."""
    definition = json_schema()["$defs"][record.kind]
    assert definition["description"]
    names = [field.name for field in dataclasses.fields(record)]
    assert list(definition["properties"]) == [*ENVELOPE, "kind", *names]
    for name in names:
        assert definition["properties"][name]["description"]
        assert "None" not in definition["properties"][name]["description"]
        assert len(definition["properties"][name]) > 1


@pytest.mark.parametrize(
    "change",
    [
        {"version": SCHEMA_VERSION + 1},
        {"sequence": -1},
        {"time_seconds": "1"},
        {"status": "exploded"},
        {"num_steps": "3"},
        {"message": 3},
        {"kind": "step"},
    ],
)
def test_bad_lines_do_not_fit(change: dict[str, object]) -> None:
    """A wrong version, type or choice is invalid."""
    assert not is_valid({**END, **change})


def test_unknown_kinds_and_fields_fit() -> None:
    """Lines of unknown kinds, or with unknown fields, are valid in this version."""
    assert is_valid({**END, "added_later": [1, 2]})
    assert is_valid({**ENVELOPE, "kind": "added_later", "anything": None})
    assert not is_valid({"kind": "added_later"})
