"""`anybatch watch` on ten finished runs of 100,000 steps: time to the first picture, and the server's memory.

Logs repeat the lines of one step of a real run with two micro-batches, with other step numbers, times and generated
losses. The server is a separate process, and Chromium opens its page: the first picture is complete when the loss of
every run is drawn, and the logs are read when no row is marked as being read.

    python benchmarks/watch_long_runs.py [--runs 10] [--steps 100000] [--out benchmarks/results/NAME.md]
"""

import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import report
from playwright.sync_api import sync_playwright

STEP = 20
LARGE = 10**9
PATIENCE_MS = 600_000.0
SERVE = "import sys; from anybatch_guide.watch.command import run; run(sys.argv[1:])"
DRAWN = "number => document.querySelectorAll('.surface')[0]?.querySelectorAll('path.curve[d^=M]').length >= number"


def real_run(folder: Path) -> Path:
    """Train for a few steps and return the log."""
    words = ("train", "digits", "--steps", str(STEP + 4), "--micro-batch-size", "128", "--out", str(folder))
    subprocess.run([sys.executable, "-m", "anybatch", *words], check=True, stdout=subprocess.DEVNULL)
    return folder / "events.jsonl"


def templates(log: Path) -> tuple[str, list[tuple[float, str]], float]:
    """Return a log's first line, the lines of one step with placeholders for numbers, and the step's seconds."""
    lines = [json.loads(text) for text in log.read_text(encoding="utf-8").splitlines()]
    own = [line for line in lines if line.get("step") == STEP and line["kind"] not in ("evaluate", "checkpoint")]
    begin = own[0]["time_seconds"]
    found = []
    for line in own:
        after = line["time_seconds"] - begin
        line |= {"sequence": LARGE + 1, "time_seconds": LARGE + 2, "step": LARGE + 3}
        if line["kind"] == "step":
            line |= {"loss": LARGE + 4, "losses": {"loss": LARGE + 4}}
        text = json.dumps(line, separators=(",", ":")).replace("%", "%%")
        for number, place in enumerate(("%(line)d", "%(now).6f", "%(step)d", "%(loss).15g"), start=1):
            text = text.replace(str(LARGE + number), place)
        found.append((after, text + "\n"))
    return json.dumps(lines[0], separators=(",", ":")) + "\n", found, found[-1][0] + 1e-3


def long_log(
    start: str, step_lines: list[tuple[float, str]], seconds: float, run: int, num_steps: int
) -> Iterator[str]:
    """Yield the lines of a run."""
    yield start
    draw, number = random.Random(run), 1  # noqa: S311 (nothing here is secret)
    for step in range(num_steps):
        loss = 2.3 * math.exp(-step / (2e4 + 3e3 * run)) + 0.1 + 0.05 * draw.random()
        for after, text in step_lines:
            yield text % {"line": number, "now": step * seconds + after, "step": step, "loss": loss}
            number += 1
    end = {"version": 1, "sequence": number, "time_seconds": num_steps * seconds, "kind": "end", "rank": 0}
    yield json.dumps({**end, "status": "completed", "num_steps": num_steps, "message": None, "digest": None}) + "\n"


def watched(folder: Path, num_runs: int) -> tuple[float, float, float, float]:
    """Return the seconds until it listens, to the first picture, and until all is read; and peak memory in MiB."""
    begin = time.monotonic()
    command = [sys.executable, "-c", SERVE, "--no-browser", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with server, sync_playwright() as playwright:
        assert server.stdout is not None
        address = server.stdout.readline().split()[1]
        listens = time.monotonic() - begin
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page()
        asked = time.monotonic()
        page.goto(address)
        page.wait_for_function(DRAWN, arg=num_runs, timeout=PATIENCE_MS)
        first = time.monotonic() - asked
        page.get_by_role("status", name="The server").get_by_text("live").wait_for(timeout=PATIENCE_MS)
        all_read = time.monotonic() - begin
        status = Path(f"/proc/{server.pid}/status").read_text(encoding="ascii")
        peak = re.search(r"VmHWM:\s+(\d+)", status)
        browser.close()
        server.terminate()
    return listens, first, all_read, int(peak.group(1)) / 1024 if peak else math.nan


def main() -> None:
    """Print the table, and write it to a file if asked."""
    parser = report.parser(__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        start, step_lines, seconds = templates(real_run(Path(root) / "real"))
        for run in range(given.runs):
            folder = Path(root) / "runs" / f"run-{run}"
            folder.mkdir(parents=True)
            with (folder / "events.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(long_log(start, step_lines, seconds, run, given.steps))
        size = sum(log.stat().st_size for log in Path(root).glob("runs/*/events.jsonl"))
        listens, first, all_read, peak = watched(Path(root) / "runs", given.runs)
    row = (f"{given.runs}", f"{given.steps:,}", f"{size / 1e9:.2f} GB", f"{listens:.2f} s", f"{first:.2f} s")
    report.publish(
        [
            "| runs | steps each | logs | listens after | first picture after | all is read after | most memory |",
            "|--:|--:|--:|--:|--:|--:|--:|",
            f"| {' | '.join((*row, f'{all_read:.1f} s', f'{peak:.0f} MiB'))} |",
        ],
        title="`anybatch watch` on long runs",
        command=f"python benchmarks/watch_long_runs.py --runs {given.runs} --steps {given.steps}",
        setting="the first picture is counted from the request of the page, the others from the start of the server",
        out=given.out,
    )


if __name__ == "__main__":
    main()
