"""The worker process: it warms up, follows commands in JSON lines, and exits at the end of its standard input.

`python -m anybatch_guide.worker`. It reads the commands run (an experiment, or a setting of the playground), pause,
resume, micro (run one micro-batch) and cancel, such as `{"do": "run", "id": ..., "kind": "experiment", "name": ...}`.
It writes `ready`, `started`, `lines`, `result` and one of `done`, `failed` and `cancelled`. Requests contain only names
from the catalogue, and numbers within limits: no path, no module, no expression.
"""

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, BinaryIO, Final, Literal

import torch

from anybatch.errors import AnyBatchError
from anybatch.parallel.launchers import usable_cores
from anybatch_guide import playground
from anybatch_guide.catalogue import experiments
from anybatch_guide.experiment import Experiment, Provenance, provenance_here
from anybatch_guide.programs import as_command
from anybatch_guide.recording import as_recording, commit_here, plain
from anybatch_guide.setting import SettingError

NICENESS: Final = 5
_QUESTION: Final = "What does a run with this setting do?"
Command = Mapping[str, Any]


class CancelledError(BaseException):
    """A run was cancelled. It is a `BaseException`, so experiments that catch `Exception` do not catch it."""


class Gate:
    """Pauses and cancels a run: every event passes through the gate.

    A paused run waits before a micro-batch, or when an experiment reports its progress. The command "micro" opens the
    gate for one micro-batch; the optimizer update runs together with the last micro-batch of the step.
    """

    def __init__(self, *, paused: bool) -> None:
        self._changed = threading.Condition()
        self._state: Literal["open", "once", "closed"] = "closed" if paused else "open"
        self._is_cancelled = False

    def set(self, command: str) -> None:
        """Apply a command: pause, resume, micro (run one micro-batch) or cancel."""
        states: dict[str, Literal["open", "once", "closed"]] = {"pause": "closed", "resume": "open", "micro": "once"}
        with self._changed:
            if command == "cancel":
                self._is_cancelled = True
            else:
                self._state = states[command]
            self._changed.notify_all()

    def is_stepped(self) -> bool:
        """Whether the run is paused, or runs a single micro-batch."""
        return self._state != "open"

    def wait_before(self, line: Mapping[str, Any]) -> None:
        """Wait before an event while the run is paused."""
        with self._changed:
            if _can_wait_before(line):
                self._changed.wait_for(lambda: self._state != "closed" or self._is_cancelled)
                self._state = "closed" if self._state == "once" else self._state
            if self._is_cancelled:
                raise CancelledError


def _can_wait_before(line: Mapping[str, Any]) -> bool:
    kind = line.get("kind")
    return kind == "guide.progress" or (kind == "micro_batch" and line.get("event") == "begin")


class Worker:
    """Runs requests one after another."""

    def __init__(self, experiments: Mapping[str, Experiment], answers: BinaryIO, provenance: Provenance) -> None:
        self._experiments = experiments
        self._answers = answers
        self._provenance = provenance
        self._writing = threading.Lock()
        self._requests: SimpleQueue[tuple[Command, Gate]] = SimpleQueue()

    def read(self, commands: BinaryIO) -> None:
        """Process commands until the server closes the pipe; then exit immediately."""
        # A gate for commands before the first run.
        gate = Gate(paused=False)
        for text in commands:
            command = json.loads(text)
            if command["do"] == "run":
                gate = Gate(paused=command.get("paused", False))
                self._requests.put((command, gate))
            else:
                gate.set(command["do"])
        # `sys.exit` would only end this thread, and a run would continue.
        os._exit(0)

    def work(self) -> None:
        """Report that it is ready, and process requests forever."""
        self._write_answer({"ready": True, "made": asdict(self._provenance)})
        while True:
            command, gate = self._requests.get()
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
            # Wait before reporting the event, so that a paused run does not report the start of a micro-batch.
            gate.wait_before(line)
            self._write_answer({"id": run, "lines": [plain(line)]})

        experiment, repeat_command = self._requested(command, gate)
        self._write_answer({"id": run, "started": True})
        provenance = replace(self._provenance, command=repeat_command)
        recording = as_recording(experiment, experiment.run(emit), provenance)
        self._write_answer({"id": run, "result": recording})

    def _requested(self, command: Command, gate: Gate) -> tuple[Experiment, str]:
        """Return the requested run, and the command that repeats it."""
        if command["kind"] == "playground":
            setting = playground.parse_setting(command["setting"])
            run = partial(playground.run, setting, is_stepped=gate.is_stepped)
            return Experiment(name="playground", question=_QUESTION, run=run, seconds=1.0), as_command(setting)
        experiment = self._experiment(command["name"])
        return experiment, f"anybatch guide record {experiment.name}"

    def _experiment(self, name: str) -> Experiment:
        experiment = self._experiments.get(name)
        if experiment is None:
            message = f"Unknown experiment {name!r}."
            raise SettingError(message, code="unknown_experiment")
        if not experiment.runs_here:
            message = f"{name} cannot run live in the guide. Record it with: anybatch guide record {name}"
            raise SettingError(message, code="only_recorded")
        return experiment

    def _write_answer(self, answer: Mapping[str, Any]) -> None:
        # Encode before taking the lock, so that only writing happens under it.
        text = json.dumps(answer, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with self._writing:
            self._answers.write(text)
            self._answers.flush()


def work(
    offered: Callable[[], Mapping[str, Experiment]] = experiments, warm: Callable[[], None] = playground.warm
) -> None:
    """Turn this process into a worker of the offered experiments and of the playground; never return."""
    # Redirect standard output, so that the output of a run does not mix with the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with suppress(OSError):
        os.nice(NICENESS)
    # Leave one core to the server and the browser.
    torch.set_num_threads(max(1, usable_cores() - 1))
    provenance = replace(provenance_here("", commit=commit_here()), command="anybatch guide")
    worker = Worker(offered(), answers, provenance)
    # Start reading commands before the warm-up, because this process has to exit if the server exits.
    threading.Thread(target=worker.read, args=(sys.stdin.buffer,), name="commands", daemon=True).start()
    warm()
    worker.work()


if __name__ == "__main__":
    work()
