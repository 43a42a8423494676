"""The worker process: warmed up at start, controlled by JSON lines, and ended by the end of its standard input.

`python -m anybatch_guide.worker`. It reads `{"do": "run", "id": ..., "kind": "experiment", "name": ...}`, or a
playground's setting, or pause, resume, micro and cancel; it writes `ready`, `started`, `lines`, `result` and one of
`done`, `failed` and `cancelled`. Requests contain only names from the catalogue, and numbers within limits:
no path, no module, no expression.
"""

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from queue import SimpleQueue
from typing import Any, BinaryIO, Final, Literal

import torch

from anybatch.errors import AnyBatchError, UserError
from anybatch_guide import playground
from anybatch_guide.catalogue import experiments
from anybatch_guide.experiment import Data, Emit, Experiment, Provenance, made_here
from anybatch_guide.recording import as_recording, commit_here, plain

NICENESS: Final = 5
_QUESTION: Final = "What does a run with this setting do?"
Command = Mapping[str, Any]


class UnknownError(UserError):
    """A refused request; `code` is the reason in a word or two."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A validated run of the playground."""

    run: Callable[[Emit, Callable[[], bool]], Data]  # function (emit, is_stepped) -> its metrics
    command: str  # the command that reproduces them


class CancelledError(BaseException):
    """A run was cancelled. Not an `Exception`, so that experiments that catch errors do not catch it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repertoire:
    """The experiments and runs that a worker offers."""

    experiments: Mapping[str, Experiment]  # experiments by name
    # function (JSON setting) -> run; raises UserError for an invalid setting
    playground: Callable[[Mapping[str, Any]], Prepared]
    warm: Callable[[], None] = lambda: None  # warm-up, called before the worker reports that it is ready


class Gate:
    """Pauses and cancels a run: every event passes through the gate.

    A paused run waits before a micro-batch, or when an experiment reports its progress. A single
    micro-batch lets it through once: the update belongs to the last micro-batch of its step.
    """

    def __init__(self, *, paused: bool) -> None:
        self._changed = threading.Condition()
        self._state: Literal["open", "once", "closed"] = "closed" if paused else "open"
        self._is_cancelled = False

    def set(self, do: str) -> None:
        """Pause, resume, micro or cancel."""
        with self._changed:
            if do == "cancel":
                self._is_cancelled = True
            else:
                self._state = {"pause": "closed", "resume": "open", "micro": "once"}[do]  # type: ignore[assignment]
            self._changed.notify_all()

    def is_stepped(self) -> bool:
        """Whether the run is paused, or runs a single micro-batch."""
        return self._state != "open"

    def wait_before(self, line: Mapping[str, Any]) -> None:
        """Wait before an event while the run is paused."""
        with self._changed:
            if _is_place_to_wait(line):
                self._changed.wait_for(lambda: self._state != "closed" or self._is_cancelled)
                self._state = "closed" if self._state == "once" else self._state
            if self._is_cancelled:
                raise CancelledError


def _is_place_to_wait(line: Mapping[str, Any]) -> bool:
    kind = line.get("kind")
    return kind == "guide.progress" or (kind == "micro_batch" and line.get("event") == "begin")


class Worker:
    """Runs requests one after another."""

    def __init__(self, repertoire: Repertoire, answers: BinaryIO, made: Provenance) -> None:
        self._repertoire = repertoire
        self._answers = answers
        self._made = made
        self._writing = threading.Lock()
        self._asked: SimpleQueue[tuple[Command, Gate]] = SimpleQueue()

    def read(self, commands: BinaryIO) -> None:
        """Process commands until the server closes the pipe; then exit immediately."""
        # For commands before the first run.
        gate = Gate(paused=False)
        for text in commands:
            command = json.loads(text)
            if command["do"] == "run":
                gate = Gate(paused=command.get("paused", False))
                self._asked.put((command, gate))
            else:
                gate.set(command["do"])
        # `sys.exit` would only end this thread, and a run would continue.
        os._exit(0)

    def work(self) -> None:
        """Report that it is ready, and process requests forever."""
        self._write_answer({"ready": True, "made": asdict(self._made)})
        while True:
            command, gate = self._asked.get()
            self._write_answer({"id": command["id"], **self._outcome(command, gate)})

    def _outcome(self, command: Command, gate: Gate) -> Mapping[str, Any]:
        try:
            self._run(command, gate)
        except CancelledError:
            return {"cancelled": True}
        except AnyBatchError as error:
            return {"failed": {"code": str(getattr(error, "code", "refused")), "message": str(error)}}
        except MemoryError:
            return {"failed": {"code": "memory", "message": "Not enough memory."}}
        except Exception as error:  # noqa: BLE001 (no error may end the worker)
            traceback.print_exc()
            message = f"The run ended with {type(error).__name__}; see the terminal for details."
            return {"failed": {"code": "error", "message": message}}
        return {"done": True}

    def _run(self, command: Command, gate: Gate) -> None:
        run = command["id"]

        def emit(line: Mapping[str, Any]) -> None:
            # First the gate, then the event: a paused run waits before it reports the start of a micro-batch.
            gate.wait_before(line)
            self._write_answer({"id": run, "lines": [plain(line)]})

        experiment, again = self._found(command, gate)
        self._write_answer({"id": run, "started": True})
        recording = as_recording(experiment, experiment.run(emit), replace(self._made, command=again))
        self._write_answer({"id": run, "result": recording.as_json()})

    def _found(self, command: Command, gate: Gate) -> tuple[Experiment, str]:
        """Return the requested run, and the command that repeats it."""
        if command["kind"] == "playground":
            prepared = self._repertoire.playground(command["setting"])

            def run(emit: Emit) -> Data:
                return prepared.run(emit, gate.is_stepped)

            return Experiment(name="playground", question=_QUESTION, run=run, seconds=1.0), prepared.command
        experiment = self._experiment(command["name"])
        return experiment, f"anybatch guide record {experiment.name}"

    def _experiment(self, name: str) -> Experiment:
        experiment = self._repertoire.experiments.get(name)
        if experiment is None:
            message = f"Unknown experiment {name!r}."
            raise UnknownError(message, code="unknown_experiment")
        if not experiment.runs_here:
            message = f"{name} can only be recorded: anybatch guide record {name}"
            raise UnknownError(message, code="only_recorded")
        return experiment

    def _write_answer(self, answer: Mapping[str, Any]) -> None:
        # Encode before taking the lock, so that only writing happens under it.
        text = json.dumps(answer, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with self._writing:
            self._answers.write(text)
            self._answers.flush()


def work(repertoire: Callable[[], Repertoire]) -> None:
    """Turn this process into a worker; never return."""
    # Output of a run must not mix with the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with suppress(OSError):
        os.nice(NICENESS)
    # Leave one core to the server and the browser.
    torch.set_num_threads(max(1, _num_cores() - 1))
    made = replace(made_here("", commit=commit_here()), command="anybatch guide")
    known = repertoire()
    worker = Worker(known, answers, made)
    # Read commands before the warm-up, because the end of the server has to end this process at any time.
    threading.Thread(target=worker.read, args=(sys.stdin.buffer,), name="commands", daemon=True).start()
    known.warm()
    worker.work()


def everything() -> Repertoire:
    """Return all experiments and runs of the guide."""
    return Repertoire(experiments=experiments(), playground=_playground, warm=playground.warm)


def _playground(setting: Mapping[str, Any]) -> Prepared:
    parsed = playground.parse_setting(setting)
    return Prepared(
        run=lambda emit, is_stepped: playground.run(parsed, emit, is_stepped=is_stepped),
        command=playground.as_command(parsed),
    )


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    work(everything)
