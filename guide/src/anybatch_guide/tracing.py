"""Trace the executed lines of a program, in order, with the values of a few variables.

A line is recorded before it runs, and its values are read just before the next line runs.
"""

import ast
import contextlib
import gc
import inspect
import io
import multiprocessing
import runpy
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import nn

from anybatch.parallel.launchers import listen_at_loopback

LOSSES = {"loss": ("loss", "total"), "loss_sum": ("loss_sum",)}
"""Names of the variables that may contain each displayed value, as tensors with one element."""
MODELS = ("model", "ddp", "network")
TIME_LIMIT_SECONDS = 300
UPDATES = ("optimizer.step()", "engine.step(")


@dataclass(frozen=True, slots=True)
class TracedFile:
    """A traced file."""

    path: Path  # path of the file
    name: str  # its name on the page: its path in the repository

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the file, to check that a trace belongs to its current content."""
        return sha256(self.path.read_bytes()).hexdigest()

    @property
    def main_line(self) -> int:
        """Return the line of `if __name__ == "__main__"`; module-level lines before it are not recorded."""
        body = ast.parse(self.path.read_text(encoding="utf-8")).body
        lines = [node.lineno for node in body if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)]
        return lines[-1] if lines else 0


@dataclass(slots=True)
class LineTrace:
    """A trace of one thread and the given files, recorded in a `with` block."""

    sources: Sequence[TracedFile]
    repeats: int = 6  # maximum recorded executions of a line
    vectors: bool = False  # whether to record weights and gradients
    # for each recorded line, the index of its file in `sources`, and its line number
    numbers: list[tuple[int, int]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)  # for each recorded line, the number of unrecorded lines before it
    # for each recorded line, the values after it: micro_batches (backwards since the last update), updates, loss,
    # loss_sum, gradient_norm; a name is missing while it has no value
    values: list[dict[str, float]] = field(default_factory=list)
    # if `vectors`, the weights and the gradient after each recorded line
    states: list[dict[str, list[float]]] = field(default_factory=list)
    printed: list[int] = field(default_factory=list)  # for each recorded line, the number of characters printed so far
    output: io.StringIO = field(default_factory=io.StringIO)  # the complete output
    _texts: list[list[str]] = field(default_factory=list)
    _files: dict[str, int] = field(default_factory=dict)
    _main: list[int] = field(default_factory=list)
    _seen: dict[tuple[int, int], int] = field(default_factory=dict)
    _num_skipped: int = 0
    _running: dict[FrameType, tuple[int, int]] = field(default_factory=dict)
    _now: dict[str, float] = field(default_factory=lambda: {"micro_batches": 0, "updates": 0})
    _model: "weakref.ref[nn.Module] | None" = None
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Self:
        """Start to trace the calling thread."""
        for number, source in enumerate(self.sources):
            self._texts.append(source.path.read_text(encoding="utf-8").splitlines())
            self._files[str(source.path)] = number
            self._main.append(source.main_line)
        self._stack.enter_context(contextlib.redirect_stdout(self.output))
        # An earlier tracer, such as a debugger or a coverage tool, is restored afterwards.
        self._stack.callback(sys.settrace, sys.gettrace())
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *error: object) -> None:
        """Stop tracing, and restore an earlier tracer."""
        self._stack.close()
        # Drop the frames, because they keep their variables alive.
        self._running.clear()

    def _on_call(self, frame: FrameType, event: str, value: object) -> Any:  # noqa: ANN401, ARG002 (as sys.settrace has it)
        code = frame.f_code
        inner = code.co_name.startswith("<") and code.co_name != "<module>"  # differs between Python versions
        return None if inner or code.co_filename not in self._files else self._on_event

    def _on_event(self, frame: FrameType, event: str, value: object) -> Any:  # noqa: ANN401, ARG002 (as sys.settrace has it)
        if event in ("line", "return"):
            self._finish(frame)
        if event == "line":
            file = self._files[frame.f_code.co_filename]
            if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a module or a class: it runs on import
                is_recorded = frame.f_lineno > self._main[file] > 0
            else:  # a line before its function: import hooks put decorators there
                is_recorded = frame.f_lineno >= frame.f_code.co_firstlineno
            if is_recorded:
                self._record(frame, (file, frame.f_lineno))
        return self._on_event

    def _record(self, frame: FrameType, location: tuple[int, int]) -> None:
        self._running[frame] = location
        self._seen[location] = self._seen.get(location, 0) + 1
        if self._seen[location] > self.repeats:
            self._num_skipped += 1
            return
        self.numbers.append(location)
        self.skipped.append(self._num_skipped)
        self.values.append({})
        self.states.append({})
        self.printed.append(0)
        self._num_skipped = 0

    def _finish(self, frame: FrameType) -> None:
        """Record the changes of the previous line."""
        location = self._running.pop(frame, None)
        if location is not None:
            text = self._texts[location[0]][location[1] - 1]
            # Detect backwards and updates from the text, because calls into torch are not traced.
            if ".backward(" in text:
                self._now["micro_batches"] += 1
            if any(update in text for update in UPDATES):
                self._now["updates"] += 1
                self._now["micro_batches"] = 0
        self._read_values(frame.f_locals)
        if self.values and not self._num_skipped:
            # Copy, because later lines change the values.
            self.values[-1] = dict(self._now)
            if self.vectors and self._model is not None:
                self.states[-1] = state_of(self._model())
            self.printed[-1] = self.output.tell()

    def _read_values(self, names: Mapping[str, Any]) -> None:
        module = next((names[name] for name in MODELS if isinstance(names.get(name), nn.Module)), None)
        if module is not None:
            self._model = weakref.ref(module)  # DDP has to be freed before its process group: keep no reference to it
        model = None if self._model is None else self._model()
        gradients = [] if model is None else [p.grad for p in model.parameters() if p.grad is not None]
        if gradients:
            self._now["gradient_norm"] = float(torch.stack([g.detach().norm() for g in gradients]).norm())
        else:
            # Cleared gradients have no norm; 0 would be the norm of zero gradients.
            self._now.pop("gradient_norm", None)
        for name, variables in LOSSES.items():
            loss = next((names[name] for name in variables if name in names), None)
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                self._now[name] = float(loss.detach())


def state_of(model: nn.Module | None) -> dict[str, list[float]]:
    """Return weights and gradients of a model as flat lists; without "gradients" if a gradient is None."""
    parameters = [] if model is None else list(model.parameters())
    state = {"weights": [parameter.detach() for parameter in parameters]}
    if parameters and all(parameter.grad is not None for parameter in parameters):
        state["gradients"] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return {
        name: [float(f"{value:.4g}") for value in torch.cat([tensor.flatten() for tensor in tensors]).tolist()]
        for name, tensors in state.items()
        if tensors
    }


def columns(lines: LineTrace) -> dict[str, Any]:
    """Return a trace as JSON: recorded lines, and the changes of each value as [index of the line, value]."""
    names = sorted({name for values in lines.values for name in values})
    changes: dict[str, list[list[float | None]]] = {name: [] for name in names}
    for index, values in enumerate(lines.values):
        for name in names:
            value = values.get(name)
            rounded = None if value is None else float(f"{value:.6g}")
            if not changes[name] or changes[name][-1][1] != rounded:
                changes[name].append([index, rounded])
    files = [file for file, _ in lines.numbers]
    return {
        "files": [
            {"path": source.name, "sha256": source.digest, "text": source.path.read_text(encoding="utf-8")}
            for source in lines.sources
        ],
        "lines": [number for _, number in lines.numbers],
        # Omitted for a single file, to save bytes.
        "file_of": [] if not any(files) else files,
        "skipped": [[index, count] for index, count in enumerate(lines.skipped) if count],
        "values": changes,
        **({"vectors": _state_changes(lines.states)} if lines.vectors else {}),
        "printed": _number_changes(lines.printed),
        "output": lines.output.getvalue(),
    }


def _state_changes(states: Sequence[Mapping[str, list[float]]]) -> dict[str, list[list[Any]]]:
    """Return the changes of weights and gradients as [index of the line, numbers or None]."""
    by_name: dict[str, list[list[Any]]] = {"weights": [], "gradients": []}
    for index, state in enumerate(states):
        for name, changes in by_name.items():
            if not changes or changes[-1][1] != state.get(name):
                changes.append([index, state.get(name)])
    return by_name


def trace_program(sources: Sequence[TracedFile], *, repeats: int = 6, vectors: bool = False) -> dict[str, Any]:
    """Run the first file as a program in a new process, and return its trace, which includes the other files.

    Python 3.11 can loop forever in a traced call of a function that ran often before the trace started.
    """
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe(duplex=False)
    process = context.Process(
        target=_serve_program,
        args=(tuple(sources),),
        kwargs={"answer": child_end, "repeats": repeats, "vectors": vectors},
        daemon=True,
    )
    return _receive([process], parent_end, child_end, sources[0].name)


def _serve_program(sources: Sequence[TracedFile], *, answer: Connection, repeats: int, vectors: bool) -> None:
    torch.set_num_threads(1)
    path = str(sources[0].path)
    with LineTrace(sources, repeats, vectors) as lines:
        runpy.run_path(path, run_name="__main__")
    answer.send(columns(lines))


def trace_rank(
    source: TracedFile, function: str, *, rank: int = 0, num_ranks: int = 2, repeats: int = 6
) -> dict[str, Any]:
    """Return the trace of one rank of a program, whose ranks are started by calling one of its functions.

    `run_rank` (in the programs of `examples/from_scratch`) is called with (rank, number of ranks, rendezvous address)
    in new processes; any other function with (rank, number of ranks), after the process group is set up.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="anybatch-lines-") as folder:
        parent_end, child_end = context.Pipe(duplex=False)
        rendezvous = Path(folder, "ranks").as_uri()
        ranks = [
            context.Process(
                target=_serve_rank,
                args=(source, function, (number, num_ranks, rendezvous)),
                kwargs={"answer": child_end if number == rank else None, "repeats": repeats},
                daemon=True,
            )
            for number in range(num_ranks)
        ]
        return _receive(ranks, parent_end, child_end, f"rank {rank} of {source.name}")


def _receive(processes: Sequence[SpawnProcess], ours: Connection, theirs: Connection, what: str) -> dict[str, Any]:
    """Start processes, return the object from the pipe, and end all of them."""
    for process in processes:
        process.start()
    # Only the child keeps its end, so that its exit closes the pipe.
    theirs.close()
    try:
        if not ours.poll(TIME_LIMIT_SECONDS):
            message = f"{what} did not end within {TIME_LIMIT_SECONDS} seconds"
            raise TimeoutError(message)
        answer: dict[str, Any] = ours.recv()
    finally:
        ours.close()
        for process in processes:
            # A process that has answered exits; a process that hangs is killed.
            process.join(10)
            process.kill()
            process.join()
    return answer


def _serve_rank(
    source: TracedFile, function: str, group: tuple[int, int, str], *, answer: Connection | None, repeats: int
) -> None:
    torch.set_num_threads(1)
    program = runpy.run_path(str(source.path), run_name="traced")
    # The other ranks get no files, so that they are not traced.
    line_trace = LineTrace([source] if answer is not None else [], repeats)
    with line_trace:
        if function == "run_rank":
            program[function](*group)
        else:
            _run_in_group(program[function], *group)
    if answer is not None:
        answer.send(columns(line_trace))


def _run_in_group(function: Any, rank: int, num_ranks: int, rendezvous: str) -> None:  # noqa: ANN401 (a program's)
    listen_at_loopback()
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks)
    function(rank, num_ranks)
    # Reference cycles may keep DDP alive, which has to be freed before its process group.
    gc.collect()
    torch.distributed.destroy_process_group()


def _number_changes(numbers: Sequence[int]) -> list[list[int]]:
    """Return the changes in a list of numbers as [index, number]."""
    return [[i, number] for i, number in enumerate(numbers) if number != (numbers[i - 1] if i else 0)]
