"""The JSON schema is generated from the record classes."""

import json
import runpy

import jsonschema
import pytest

from anybatch.events.log_lines import SCHEMA_VERSION
from tests.architecture.source_tree import PACKAGE, ROOT

SCHEMA = PACKAGE / "events" / "schema.json"
ENVELOPE = {"version": SCHEMA_VERSION, "sequence": 0, "time_seconds": 0.5}
END = {**ENVELOPE, "kind": "end", "rank": 0, "status": "completed", "num_steps": 3, "message": None, "digest": None}


def is_valid(line: object) -> bool:
    """Return whether a line fits the schema."""
    return bool(jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8"))).is_valid(line))


def test_the_committed_schema_is_the_generated_one() -> None:
    """The committed schema.json matches the record classes, and each field is described in JSON terms."""
    generated = runpy.run_path(str(ROOT / "docs" / "write_schema.py"))["schema_text"]()
    assert SCHEMA.read_text(encoding="utf-8") == generated, "run python docs/write_schema.py"
    for definition in json.loads(generated)["$defs"].values():
        assert definition["description"]
        for name, field in definition.get("properties", {}).items():
            assert name == "kind" or "None" not in field["description"]


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
