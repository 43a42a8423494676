"""Logging libraries receive the numbers of the JSON lines; each is tested offline, by reading its files."""

import json
import os
import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from anybatch.cli.main import main
from anybatch.cli.status import Status
from anybatch.events.jsonl import read_jsonl
from anybatch.events.metrics_log import LIBRARIES
from tests.architecture.source_tree import ROOT
from tests.cli.small import SPEC

Number = tuple[str, int, float]
WANDB_READER = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2

def records(data):  # a log of LevelDB: blocks of 32 KiB, fragments with 7 bytes of header, after 7 bytes of the file's
    position, parts = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # the whole record, or its last fragment
            yield parts
            parts = b""

for path in sys.argv[1:]:
    for data in records(open(path, "rb").read()):
        items = wandb_internal_pb2.Record.FromString(data).history.item
        if items:
            print(json.dumps({"/".join([item.key, *item.nested_key]).strip("/"): item.value_json for item in items}))
"""


def wandb_numbers(folder: Path) -> Iterator[Number]:
    """Yield the numbers in the files of offline runs."""
    files = sorted(map(str, folder.glob("run/wandb/offline-run-*/*.wandb")))
    done = subprocess.run(  # noqa: S603 (our own)
        [sys.executable, "-c", WANDB_READER, *files], capture_output=True, text=True, check=True
    )
    for line in done.stdout.splitlines():
        values = {name: json.loads(text) for name, text in json.loads(line).items()}
        yield from ((name, values["_step"], value) for name, value in values.items() if name[0] != "_")


def mlflow_numbers(folder: Path) -> Iterator[Number]:
    """Yield the numbers in the SQLite store, which has one run."""
    with closing(sqlite3.connect(folder / "mlflow.db")) as store:
        assert len(store.execute("select distinct run_uuid from metrics").fetchall()) == 1
        yield from store.execute("select key, step, value from metrics")


def trackio_numbers(folder: Path) -> Iterator[Number]:
    """Yield the numbers in trackio's database, which has one run."""
    with closing(sqlite3.connect(folder / "trackio" / "anybatch.db")) as store:
        assert len(store.execute("select distinct run_name from metrics").fetchall()) == 1
        for step, text in store.execute("select step, metrics from metrics"):
            yield from ((name, step, value) for name, value in json.loads(text).items())


def comet_numbers(folder: Path) -> Iterator[Number]:
    """Yield the numbers in the archives of offline experiments."""
    for archive in (folder / "comet").glob("*.zip"):
        with zipfile.ZipFile(archive) as opened:
            messages = [json.loads(line)["payload"] for line in opened.read("messages.json").splitlines()]
        for metric in filter(None, (message.get("metric") for message in messages)):
            if "." not in metric["metricName"] and metric["metricName"] != "process duration":  # Comet's own numbers
                yield metric["metricName"], metric["step"], float(metric["metricValue"])


READERS: dict[str, Callable[[Path], Iterator[Number]]] = {
    "wandb": wandb_numbers,
    "mlflow": mlflow_numbers,
    "trackio": trackio_numbers,
    "comet": comet_numbers,
}


def offline(folder: Path) -> dict[str, str]:
    """Return the environment in which each library writes only to a folder."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "TRACKIO_DIR": str(folder / "trackio"),
        "COMET_START_ONLINE": "0",
        "COMET_OFFLINE_DIRECTORY": str(folder / "comet"),
    }


def numbers_in(log: Path) -> Iterator[Number]:
    """Yield the numbers in a log of JSON lines, with the number of finished steps."""
    for line in read_jsonl(log):
        if line["kind"] == "step":
            values = {name: line[name] for name in ("loss", "gradient_norm")} | {"update_skipped": line["skipped"]}
            values["learning_rate"] = line["learning_rates"][0]
            yield from ((name, line["step"] + 1, float(value)) for name, value in values.items())
        elif line["kind"] == "evaluate":
            yield from ((f"evaluation/{name}", line["step"], value) for name, value in line["metrics"].items())
        elif line["kind"] == "memory":
            sizes = {name: line[f"{name}_bytes"] for name in ("peak", "allocated", "reserved", "limit")}
            yield from ((f"memory_gib/{name}", line["step"] + 1, n / 2**30) for name, n in sizes.items() if n)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_has_the_numbers_of_the_log(library: str, tmp_path: Path) -> None:
    """A run and its resumption are one run of the library, with exactly the numbers of the JSON lines."""
    if find_spec(LIBRARIES[library].module) is None:
        pytest.skip(f"needs the extra anybatch[{library}]")
    for words in (f"{SPEC} --steps 8", "--resume --steps 10"):
        command = f"train {words} --out run --log {library} --json --quiet".split()
        done = subprocess.run(  # noqa: S603 (our own)
            [sys.executable, "-m", "anybatch", *command],
            cwd=tmp_path,
            env=offline(tmp_path),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["verb"] == "train"
    found = [number for number in READERS[library](tmp_path) if number[0] != "samples_per_second"]

    expected = sorted(numbers_in(tmp_path / "run" / "events.jsonl"))
    assert sorted(found) == expected
    print(f"{library}: {len(expected)} values are equal")  # noqa: T201 (with pytest -s)


def test_a_missing_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If the library is not installed, the command ends before the first step, with the line that installs it."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(f"train {SPEC} --out {tmp_path / 'run'} --log wandb --json".split()) == Status.USAGE
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert values["error"]["code"] == "needs_wandb"
    assert "pip install 'anybatch[wandb]'" in values["error"]["message"]
