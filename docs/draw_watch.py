"""Make seven runs, and draw their pages: `python -m docs.draw_watch [FOLDER]`; needs Chromium and about two minutes.

Without a folder, the program draws the two pictures of docs/watch.md. With a folder, it draws all pages there, for a
desktop and a phone, in light and dark mode; it also keeps the runs there, and uses them again.
"""

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Browser, FloatRect, expect

import anybatch as ab
from anybatch.recipes.digits import Digits
from anybatch_guide.watch.command import run as watch
from guide.tests.browser.chromium import DESKTOP, PHONE, launched, opened

DOCS = Path(__file__).parent
TRAIN = (sys.executable, "-m", "anybatch", "train")
DIGITS = ("digits", "--effective-batch-size", "64", "--micro-batch-size", "16", "--epochs", "10")
RUNS: dict[str, tuple[str, ...]] = {
    "two-ranks": (*DIGITS, "--ranks", "2"),
    "killed-and-resumed": (*DIGITS, "--checkpoint-seconds", "0.5"),
    "diverged": (*DIGITS, "--learning-rate", "100"),
    "higher-rate": (*DIGITS, "--learning-rate", "0.01"),
    "batch-256": (*DIGITS, "--effective-batch-size", "256"),
    "text": ("text", "--effective-batch-size", "8", "--steps", "40"),
}
PICTURED, TOP = "two-ranks", FloatRect(x=0, y=0, width=1280, height=2400)
LOOP = "own-loop"
LOOP_STEPS, LOOP_BATCH, LOOP_RATE = 100_000, 32, 0.01


def train(folder: Path) -> None:
    """Make six runs with the command line, and a run of 100,000 steps in a plain loop."""
    for name, options in RUNS.items():
        if (folder / name).exists():
            continue
        command = [*TRAIN, *options, "--out", str(folder / name)]
        if name == "killed-and-resumed":
            kill_halfway(command, folder / name)
            command = [*TRAIN, "--resume", "--out", str(folder / name)]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    if not (folder / LOOP).exists():
        train_own_loop(folder / LOOP)


def kill_halfway(command: list[str], folder: Path) -> None:
    """Start a run, and kill it a few steps after a checkpoint."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        log = folder / "events.jsonl"
        while process.poll() is None:
            text = log.read_text(encoding="utf-8") if log.exists() else ""
            if '"kind":"step"' in text.partition('"event":"saved"')[2] and text.count('"kind":"step"') > 80:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.05)


def train_own_loop(folder: Path) -> None:
    """Train a linear classifier in a loop without torch."""
    data, draw = Digits("train"), np.random.default_rng(0)
    images, labels, weights = data.images.flatten(1).numpy(), np.eye(10)[data.labels.numpy()], np.zeros((64, 10))
    sizes = {"effective_batch_size": LOOP_BATCH, "micro_batch_size": LOOP_BATCH}
    with ab.record(folder, learning_rate=LOOP_RATE, **sizes) as run:
        for _ in range(LOOP_STEPS):
            chosen = draw.integers(len(images), size=LOOP_BATCH)
            outputs = np.exp(images[chosen] @ weights)
            outputs /= outputs.sum(1, keepdims=True)
            loss = -np.log((outputs * labels[chosen]).sum(1)).mean()
            weights -= LOOP_RATE * images[chosen].T @ (outputs - labels[chosen]) / LOOP_BATCH
            run.step(loss, num_samples=LOOP_BATCH, learning_rate=LOOP_RATE)


def looks() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the browser options of each device and colour scheme."""
    for device, options in (("desktop", DESKTOP), ("phone", PHONE)):
        for scheme in ("light", "dark"):
            yield f"{device}-{scheme}", {**options, "color_scheme": scheme, "reduced_motion": "reduce"}


def draw(browser: Browser, address: str, folder: Path, look: str, options: dict[str, Any]) -> None:
    """Draw the overview and the page of each run."""
    with opened(browser, address, **options) as watched:
        page = watched.page
        expect(page.locator("main tbody .chip")).to_have_count(len(RUNS) + 1)
        chart = page.get_by_role("slider", name="loss of the runs")
        for key in ("Home", *"++++++++"):  # zoom in, because the run of 100,000 steps would hide the other runs
            chart.press(key)
        chart.blur()
        page.screenshot(path=folder / f"overview-{look}.png", full_page=True)
        for name in (*RUNS, LOOP):
            page.goto(f"{address}#/run/{name}")
            page.get_by_role("heading", name=name, level=1).wait_for()
            page.screenshot(path=folder / f"{name}-{look}.png", full_page=True)
            if name == PICTURED and look == "desktop-light":
                page.screenshot(path=folder / "docs.png", full_page=True, clip=TOP)
        assert watched.faults == []


def main(arguments: list[str]) -> None:
    """Draw the two pictures of docs/, or all pages in a folder."""
    with tempfile.TemporaryDirectory() as place, launched() as browser:
        folder = Path(arguments[0] if arguments else place).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "watch.html"
        with contextlib.chdir(folder):  # the pages show the paths of the runs
            train(Path("runs"))
            watch([*(f"runs/{name}" for name in (*RUNS, LOOP)), "--export", str(file)])
        for look, options in looks() if arguments else [next(looks())]:
            draw(browser, file.as_uri(), folder, look, options)
        if not arguments:
            (folder / "overview-desktop-light.png").replace(DOCS / "watch.png")
            (folder / "docs.png").replace(DOCS / "watch_run.png")


if __name__ == "__main__":
    main(sys.argv[1:])
