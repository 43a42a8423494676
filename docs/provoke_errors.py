"""Provoke common errors of runs, and print their messages and exit statuses: `python docs/provoke_errors.py`.

The commands run in one temporary folder. The full disk is a file system of one megabyte; it needs Linux and permission
to mount.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SECONDS = 200
SMALL = """
import os, signal
import torch
import anybatch as ab

CALLS = []

def loss(model, batch):
    CALLS.append(1)
    if len(CALLS) == 20 and os.environ.get("STRIKE") == os.environ.get("RANK", "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.functional.mse_loss(model(batch), 2 * batch)

def job(width=1):
    return ab.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.Linear(width, 1)),
        optimizer=torch.optim.SGD,
        loss=ab.mean_over_samples(loss),
        dataset=lambda: torch.arange(64.0)[:, None] / 64,
        defaults=ab.RunConfig(effective_batch_size=16, learning_rate=0.1, epochs=10),
    )

def other():
    return job(width=2)

def large():
    return job(width=400_000)
"""


def say(title: str, *words: str, env: Mapping[str, str] | None = None) -> None:
    """Run `anybatch`, and print its standard error and exit status; normal output is dropped."""
    command = [sys.executable, "-m", "anybatch", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False, env={**os.environ, **(env or {})}
    )
    print(f"## {title}\n\n$ anybatch {' '.join(words)}\n{done.stderr.rstrip()}\n(exit status {done.returncode})\n")


def truncate_newest(folder: Path) -> None:
    """Truncate the tensors of the newest checkpoint to half of their bytes."""
    newest = max((folder / "checkpoints").iterdir())
    file = newest / "tensors.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


@contextmanager
def small_disk(place: Path) -> Iterator[bool]:
    """Mount a file system of one megabyte; yield whether this process had the permission."""
    place.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    could = mount is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield could
    finally:
        if could:
            subprocess.run([shutil.which("umount") or "umount", str(place)], check=True)


@contextmanager
def taken_port() -> Iterator[str]:
    """Listen on a port, so that no other program can use it; yield its number."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield str(taken.getsockname()[1])


def main() -> None:
    """Provoke the errors, one after another."""
    Path("small.py").write_text(SMALL, encoding="utf-8")
    Path("broken.py").write_text("import torch\nimport no_such_package\n", encoding="utf-8")
    Path("empty.py").write_text("def job():\n    return None\n", encoding="utf-8")
    Path("sklearn.py").write_text("raise ModuleNotFoundError(name='sklearn')\n", encoding="utf-8")
    say("a recipe with a failing import", "train", "broken.py:job")
    say("a function that returns no recipe", "train", "empty.py:job")
    say("a missing extra", "train", "digits", env={"PYTHONPATH": f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"})
    Path("sklearn.py").unlink()
    with taken_port() as port:
        launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        say("a port in use", "train", "small.py:job", env=launched)
    say("a run to resume later (no error)", "train", "small.py:job", "--out", "run", "--steps", "20")
    say("an existing folder", "train", "small.py:job", "--out", "run")
    say("a checkpoint of another model", "train", "small.py:other", "--resume", "--out", "run", "--steps", "30")
    truncate_newest(Path("run"))
    say("a truncated checkpoint", "train", "small.py:job", "--resume", "--out", "run", "--steps", "30")
    for checkpoint in Path("run", "checkpoints").iterdir():
        (checkpoint / "tensors.safetensors").write_bytes(b"")
    say("every checkpoint truncated", "train", "small.py:job", "--resume", "--out", "run", "--steps", "40")
    with small_disk(Path("disk")) as could:
        if could:
            say("a full disk", "train", "small.py:large", "--out", "disk/run", "--learning-rate", "1e-9")
        else:
            print("## a full disk\n\n(this process may not mount a small file system)\n")
    say("a rank that dies", "train", "small.py:job", "--ranks", "2", "--out", "dies", env={"STRIKE": "1"})
    header = json.loads(Path("dies", "run.json").read_text(encoding="utf-8"))
    assert header["origin"]["ranks"] == 2


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        os.chdir(root)
        main()
        os.chdir("/")
