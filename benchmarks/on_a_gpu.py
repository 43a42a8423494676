"""Measure everything that needs a GPU, in one command: `make gpu`, or `python benchmarks/on_a_gpu.py`.

Six stages run in order of value. Each has its own process and time limit and writes one file with its tables to
`--out`; rows are kept once they are measured, so a stage that is cut off keeps its rows. Nine minutes in all.
docs/gpu.md says what each stage measures, and how to send your results.

    python benchmarks/on_a_gpu.py --device cpu --size small    # rehearses every stage without a GPU
    python benchmarks/on_a_gpu.py --stages memory throughput   # some of them
"""

import argparse
import importlib
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from gpu.stage import FAILED, Row, Setting, read_rows, row_writer, run_checks, tables

ROOT = Path(__file__).resolve().parents[1]
FOUND_NONE = "no CUDA device: nothing was run (`--device cpu` rehearses every stage on the CPU)"
SECONDS_TO_END = 5
SOME_FAILED = 3
"""Exit status of a stage with failed checks, which its table lists."""
SMALLER_FACTOR = 4
"""A rehearsal on a CPU may take longer than the same stage on a GPU."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the measurements, with its own process.

    Attributes:
        name: name of its module in benchmarks/gpu/, and of its result file.
        seconds: time limit on a GPU.
    """

    name: str
    seconds: int


STAGES = (
    Stage("exactness", 60),
    Stage("memory", 90),
    Stage("throughput", 180),
    Stage("out_of_memory", 60),
    Stage("data", 90),
    Stage("step_times", 60),
)


def run_here(stage: str, setting: Setting, rows: Path) -> int:
    """Run a stage in this process, and return its number of failed checks."""
    module: Any = importlib.import_module(f"gpu.{stage}")
    return run_checks(module.CHECKS, setting, row_writer(rows))


def run_in_subprocess(stage: Stage, setting: Setting, rows: Path, seconds: float) -> str:
    """Run a stage in a separate process with a time limit, and return how it ended."""
    command = [sys.executable, __file__, "--stage", stage.name, "--rows", str(rows)]
    command += ["--device", setting.device, "--size", setting.size]
    begin = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=os.name != "nt")
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"stopped at its limit of {seconds:.0f} s: later rows are missing"
    finally:
        end(process)
    took = f"{time.monotonic() - begin:.0f} s of at most {seconds:.0f} s"
    if status not in (0, SOME_FAILED) and status > 0:
        return f"ended with exit status {status} after {took}: later rows are missing"
    if status < 0:
        return f"killed by signal {-status} after {took}: later rows are missing"
    return f"finished in {took}"


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a stage and all its processes."""
    for number in (signal.SIGTERM, signal.SIGKILL) if os.name != "nt" else ():
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    process.wait()


def machine(device: str) -> str:
    """Return the hardware and versions in one line."""
    cores = f"Python {platform.python_version()}, {os.cpu_count()} cores"
    if device == "cpu":
        return f"torch {torch.__version__}, {cores}, {platform.machine()} CPU: a rehearsal, no GPU"
    name, memory, driver = gpu_facts(device)
    return (
        f"{name} ({memory}, driver {driver}), torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"cuDNN {torch.backends.cudnn.version()}, {cores}"
    )


def gpu_facts(device: str) -> list[str]:
    """Return the name, memory and driver of a GPU without a CUDA context, which would count in every stage's memory."""
    query = "--query-gpu=name,memory.total,driver_version"
    found = _output(["nvidia-smi", query, "--format=csv,noheader", f"--id={torch.device(device).index or 0}"])
    facts = [fact.strip() for fact in found.split(",")]
    return facts if len(facts) == 3 else ["unknown GPU", "unknown memory", "unknown"]


def hardware(device: str) -> str:
    """Return the device in the form for file names, such as "h100"."""
    if device == "cpu":
        return "cpu"
    name, *_ = gpu_facts(device)
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word not in ("nvidia", "geforce")]
    return "_".join(words[:2] if words[0] in ("rtx", "tesla") else words[:1])


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def write_tables(stage: str, rows: list[Row], setting: Setting, folder: Path, *, ending: str, commit: str) -> Path:
    """Write the tables of a stage, and return their file."""
    module: Any = importlib.import_module(f"gpu.{stage}")
    today = datetime.now(tz=UTC).date()
    size = "" if setting.size == "full" else f"_{setting.size}"
    path = folder / f"gpu_{stage}_{hardware(setting.device)}{size}_{today}.md"
    head = [
        f"# {module.TITLE}",
        "",
        f"{today}, {machine(setting.device)}, commit {commit}, size {setting.size}.",
        "",
        f"`python benchmarks/on_a_gpu.py --stages {stage}`: {ending}.",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*head, *tables(rows)]) + "\n", encoding="utf-8")
    return path


def run_stages(given: argparse.Namespace, setting: Setting) -> int:
    """Run the chosen stages, write their files, and return the exit status."""
    commit = given.commit or _output(["git", "rev-parse", "--short=8", "HEAD"])
    factor = given.limit_factor if setting.on_gpu else SMALLER_FACTOR * given.limit_factor
    num_bad = 0
    print(f"{machine(setting.device)}; size {setting.size}", flush=True)
    with tempfile.TemporaryDirectory(prefix="anybatch-gpu-") as folder:
        for stage in STAGES:
            if stage.name not in given.stages:
                continue
            rows = Path(folder, f"{stage.name}.jsonl")
            print(f"{stage.name}:", flush=True)
            ending = "interrupted: later rows are missing"
            try:
                ending = run_in_subprocess(stage, setting, rows, stage.seconds * factor)
            finally:  # on Ctrl-C the program ends, and this stage keeps its rows
                found = read_rows(rows)
                path = write_tables(stage.name, found, setting, given.out, ending=ending, commit=commit)
                print(f"{stage.name}: {ending}; {path}", flush=True)
            num_bad += "missing" in ending or any(row.table == FAILED or "NO" in row.cells.values() for row in found)
    return int(num_bad > 0)


def main() -> int:
    """Run the stages, or one of them in this process."""
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", help='such as "cuda:0", or "cpu" to rehearse')
    parser.add_argument("--size", choices=("full", "small", "tiny"), help="full on a GPU, small on a CPU")
    parser.add_argument("--stages", nargs="+", choices=names, default=names, help="all unless given")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the result files")
    parser.add_argument("--limit-factor", type=float, default=1.0, help="multiplies every time limit")
    parser.add_argument("--commit", help="of the code, where git cannot say it")
    parser.add_argument("--stage", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.device != "cpu" and not torch.cuda.is_available():
        print(FOUND_NONE)
        return 1
    setting = Setting(given.device, given.size or ("small" if given.device == "cpu" else "full"))
    if given.stage:
        return SOME_FAILED if run_here(given.stage, setting, given.rows) else 0
    try:
        return run_stages(given, setting)
    except KeyboardInterrupt:
        print("interrupted: the files of the stages so far are kept")
        return 130


if __name__ == "__main__":
    sys.exit(main())
