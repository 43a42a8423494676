"""A log has one line per record, complete even if the run fails."""

import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import anybatch.events
from anybatch.core.records import (
    EndRecord,
    MicroBatchRecord,
    PhaseRecord,
    Record,
    Scalar,
    StepRecord,
)
from anybatch.errors import UserError
from anybatch.events.jsonl import JsonlLog, read_jsonl
from anybatch.events.log_lines import SCHEMA_VERSION
from tests.events import recorded_run
from tests.events.recorded_run import CountingTensor
from tests.raising import raises

SCHEMA = Path(anybatch.events.__file__).with_name("schema.json")
VALIDATOR = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))


def ticking() -> Callable[[], float]:
    """Return a clock that advances 0.25 seconds per call."""
    ticks = itertools.count()
    return lambda: next(ticks) / 4


def micro_batch(step: int = 0, loss_sum: Scalar = 1.5) -> MicroBatchRecord:
    """Return the end of the only micro-batch of a step."""
    return recorded_run.micro_batch(step, 0, num_micro_batches=1, counts={"loss": 4.0}, loss_sums={"loss": loss_sum})


def step(number: int = 0, loss: Scalar = 0.5) -> StepRecord:
    """Return a step with some tensor fields."""
    rates = (torch.tensor(0.5), 0.25)
    return recorded_run.step(number, loss, gradient_norm=None, clipped=torch.tensor(True), learning_rates=rates)


def end(num_steps: int = 1) -> EndRecord:
    """Return the end of a completed run."""
    return recorded_run.end(num_steps)


def phase(rank: int = 0) -> PhaseRecord:
    """Return the beginning of a phase: a record that is buffered until a step."""
    return PhaseRecord(rank=rank, event="begin", step=0, name="clip", position=None)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, parsed as strict JSON."""

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of type `hint`, with tensors on the CPU and the meta device."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=2).map(tuple)
    if torch.Tensor in arguments:
        kind = bool if bool in arguments else float
        numbers = values(kind)
        tensors = st.builds(torch.tensor, numbers, device=st.sampled_from(["cpu", "meta"]))
        return numbers | tensors | (st.none() if NoneType in arguments else st.nothing())
    if origin is Mapping:
        return st.dictionaries(st.text(), values(arguments[1]), max_size=2)
    if arguments:
        return st.one_of([values(argument) for argument in arguments])
    return {int: st.integers(0, 2**60), float: st.floats(), bool: st.booleans(), str: st.text(), NoneType: st.none()}[
        hint
    ]


def records() -> st.SearchStrategy[Record]:
    """Return a strategy for records of every kind, with all values that their types allow."""
    kinds = []
    for kind in get_args(Record):
        hints = get_type_hints(kind)
        kinds.append(st.builds(kind, **{name: values(hint) for name, hint in hints.items() if name != "kind"}))
    return st.one_of(kinds)


@pytest.mark.slow
@given(observed=st.lists(records(), max_size=6), num_steps_per_flush=st.integers(1, 3))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_line_fits_the_schema(tmp_path: Path, observed: list[Record], num_steps_per_flush: int) -> None:
    """The log has one valid line for every record, in order, with its sequence number and time."""
    path = tmp_path / "log.jsonl"
    path.unlink(missing_ok=True)
    with JsonlLog(path, clock=ticking(), num_steps_per_flush=num_steps_per_flush) as log:
        for record in observed:
            log.observe(record)
    lines = lines_of(path)
    for line in lines:
        VALIDATOR.validate(line)
    assert [(line["sequence"], line["time_seconds"], line["kind"], line["rank"]) for line in lines] == [
        (number, number / 4, record.kind, record.rank) for number, record in enumerate(observed)
    ]
    assert list(read_jsonl(path)) == lines


def test_a_line_has_the_fields_of_its_record(tmp_path: Path) -> None:
    """A line has the envelope and then every field of the record, tensors as numbers."""
    path = tmp_path / "log.jsonl"
    with JsonlLog(path, clock=ticking()) as log:
        log.observe(step(3, loss=torch.tensor(0.5, requires_grad=True) * 2))
    assert path.read_text(encoding="utf-8") == (
        '{"version":1,"sequence":0,"time_seconds":0.0,"kind":"step","rank":0,"step":3,"epoch":0,"sample_offset":64,'
        '"num_samples":64,"num_micro_batches":1,"loss":1.0,"losses":{"loss":1.0},"counts":{"loss":64.0},'
        '"gradient_norm":null,"clipped":true,"learning_rates":[0.5,0.25],"skipped":false}\n'
    )


@pytest.mark.parametrize("num_steps_per_flush", [1, 3])
def test_devices_are_read_with_the_flush(tmp_path: Path, num_steps_per_flush: int) -> None:
    """Micro-batches, phases and steps are written together, after N steps; events and the end immediately."""
    path, tensor = tmp_path / "log.jsonl", recorded_run.counting(2.0)
    with JsonlLog(path, num_steps_per_flush=num_steps_per_flush) as log:
        for number in range(num_steps_per_flush):
            assert (CountingTensor.num_read, path.read_bytes()) == (0, b"")
            log.observe(micro_batch(number, loss_sum=tensor))
            log.observe(phase())
            log.observe(step(number))
        assert CountingTensor.num_read == num_steps_per_flush
        assert [line["kind"] for line in lines_of(path)] == ["micro_batch", "phase", "step"] * num_steps_per_flush
        for record in (phase(), recorded_run.checkpoint(1), phase(), end()):
            log.observe(record)
        assert [line["kind"] for line in lines_of(path)][-4:] == ["phase", "checkpoint", "phase", "end"]
    assert CountingTensor.num_read == num_steps_per_flush


def test_a_record_keeps_no_graph_alive(tmp_path: Path) -> None:
    """A buffered loss does not keep its autograd graph alive."""
    inputs = torch.ones(3, requires_grad=True)
    freed: list[int] = []

    class Tracked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.tracker = Tracker()
            return value.sum()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            return gradient.expand(3)

    class Tracker:
        def __del__(self) -> None:
            freed.append(1)

    with JsonlLog(tmp_path / "log.jsonl") as log:
        log.observe(micro_batch(loss_sum=Tracked.apply(inputs)))  # type: ignore[no-untyped-call]
        assert freed


@pytest.mark.slow
def test_a_log_cut_anywhere_is_repaired(tmp_path: Path) -> None:
    """A partial last line is removed, at any length, and the sequence continues without a gap or duplicate."""
    path, num_lines = tmp_path / "log.jsonl", 2
    with JsonlLog(path, clock=ticking()) as log:
        for number in range(num_lines + 1):
            log.observe(step(number))
    whole = path.read_bytes()
    kept = b"".join(whole.splitlines(keepends=True)[:num_lines])
    last = len(whole) - len(kept)
    for num_bytes in (0, *range(1, last, 7), last - 1):
        path.write_bytes(whole[: len(kept) + num_bytes])
        with JsonlLog(path) as log:
            assert path.read_bytes() == kept
            log.observe(end())
        assert [line["sequence"] for line in lines_of(path)] == list(range(num_lines + 1))


@pytest.mark.parametrize(
    "content", [b"import torch\n", b"no newline", b'{"other": 1}\n', b'{"version":1,"sequence":0}\nsomething else\n']
)
def test_foreign_files_are_unchanged(tmp_path: Path, content: bytes) -> None:
    """A folder raises, and so does a file that is not a log, which is unchanged with its unfinished last line."""
    with raises(UserError, "is_a_folder"):
        JsonlLog(tmp_path)
    path = tmp_path / "train.py"
    path.write_bytes(content)
    with raises(UserError, "not_a_log"):
        JsonlLog(path)
    assert path.read_bytes() == content


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Limit the file size of this process to `num_bytes`, to simulate a full disk."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_raises_and_leaves_whole_lines(tmp_path: Path) -> None:
    """On a full disk the error has the path, the partial line is removed, and logging can continue later."""
    path = tmp_path / "log.jsonl"
    with JsonlLog(path) as log:
        log.observe(step(0))
        num_bytes = path.stat().st_size
        with largest_file(num_bytes + 100), pytest.raises(OSError, match=path.name) as caught:
            log.observe(step(1))
        assert caught.value.filename == os.fspath(path)
        assert path.stat().st_size == num_bytes
        log.observe(step(2))
    assert [line["sequence"] for line in lines_of(path)] == [0, 2]


def test_threads_share_a_log(tmp_path: Path) -> None:
    """Records from several threads each get one line and a unique sequence number."""
    path = tmp_path / "log.jsonl"
    ready = threading.Barrier(4)
    interval = sys.getswitchinterval()

    def write(log: JsonlLog, rank: int) -> None:
        ready.wait()
        for number in range(50):
            log.observe(phase(rank) if number % 5 else step(number))

    with JsonlLog(path, clock=lambda: sum(range(1000))) as log:
        threads = [threading.Thread(target=write, args=(log, rank)) for rank in range(4)]
        sys.setswitchinterval(1e-6)  # provoke thread switches
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
    assert [line["sequence"] for line in lines_of(path)] == list(range(200))


def test_reading_skips_and_counts_unknown_lines(tmp_path: Path) -> None:
    """Lines of other versions and invalid lines are counted and skipped; unknown kinds and fields are returned."""
    path = tmp_path / "log.jsonl"
    with JsonlLog(path) as log:
        log.observe(end())
    known = path.read_bytes()
    later = b'{"version":%d,"sequence":1,"kind":"end"}\n' % (SCHEMA_VERSION + 1)
    unknown = b'{"version":%d,"sequence":2,"time_seconds":0,"kind":"added_later"}\n' % SCHEMA_VERSION
    broken = [b"not json\n", b"[1]\n", b"\xff\xfe\n", b"\n", b"[" * 100_000 + b"\n"]
    path.write_bytes(known + later + unknown + b"".join(broken) + known + known[:20])
    lines = read_jsonl(path)
    for _ in range(2):  # a second pass counts again
        assert [line["kind"] for line in lines] == ["end", "added_later", "end"]
        assert lines.num_skipped == 1 + len(broken)
