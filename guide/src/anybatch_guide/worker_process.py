"""`WorkerProcess`: the worker as a subprocess of the server, which reads and writes JSON lines and can be killed."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from anybatch_guide.limits import Limits

COMMAND: Final = (sys.executable, "-m", "anybatch_guide.worker")


class WorkerProcess:
    """A running worker, created by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, folder: "tempfile.TemporaryDirectory[str]") -> None:
        self._process = process
        self._folder = folder

    @classmethod
    async def start(cls, command: Sequence[str], limits: Limits) -> "WorkerProcess":
        """Start a worker in a new session, so that Ctrl-C reaches only the server, and the whole group can be ended."""
        folder = tempfile.TemporaryDirectory(prefix="anybatch-guide-", ignore_cleanup_errors=True)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**os.environ, "TMPDIR": folder.name},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=limits.answer_bytes,
            )
        except BaseException:
            folder.cleanup()
            raise
        return cls(process, folder)

    @property
    def process_id(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, command: Mapping[str, Any]) -> None:
        """Send a command; it is lost if the worker has ended, which `answers` detects."""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(json.dumps(command, allow_nan=False).encode() + b"\n")

    async def answers(self) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the worker's answers until it ends; kill it if an answer is invalid or too long."""
        assert self._process.stdout is not None
        while True:
            try:
                text = await self._process.stdout.readline()
                answer = json.loads(text) if text else None
            except ValueError:
                self.signal(signal.SIGKILL)
                return
            if not isinstance(answer, dict):
                return
            yield answer

    def signal(self, signal_number: signal.Signals) -> None:
        """Send a signal to the worker's process group, unless the worker has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal_number)

    async def end(self, limits: Limits) -> None:
        """Terminate the worker, which has no state to save; kill it after a timeout."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(limits.terminate_seconds):
                await self._process.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self._process.wait()
        self._folder.cleanup()

    def resident_bytes(self) -> int | None:
        """Return the worker's resident memory in bytes; None if the system does not report it."""
        try:
            pages = Path(f"/proc/{self._process.pid}/statm").read_text(encoding="ascii").split()[1]
        except (OSError, IndexError):
            return None
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
