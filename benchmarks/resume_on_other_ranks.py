"""Two killed ranks are resumed as one, two or three: each step has the same samples, and equal losses up to rounding.

The recipe `digits` runs for two epochs on two ranks and gets SIGKILL at a random moment of the second one. It has one
sample in each micro-batch, so that logs name every sample: each step must have the samples of the uninterrupted run,
and each loss is compared with that run's.

    python benchmarks/resume_on_other_ranks.py [--out benchmarks/results/NAME.md]
"""

import random
import tempfile
from pathlib import Path

import report
from resume_after_kill import STEP_SECONDS, kill_in_step, start

from anybatch.events.jsonl import read_jsonl

NUM_STEPS = 12
OPTIONS = ("digits", "--epochs", "2", "--micro-batch-size", "1", "--ranks", "2")


def sessions(folder: Path) -> list[tuple[int, int]]:
    """Return the first step and the ranks of each session of a run, from rank 0's log."""
    starts = [line for line in read_jsonl(folder / "events.jsonl") if line["kind"] == "start"]
    return [(line["first_step"], line["world_size"]) for line in starts]


def samples_of_steps(folder: Path) -> dict[int, list[int]]:
    """Return step -> its samples over all ranks, without steps that a resume discarded."""
    samples: dict[int, list[int]] = {}
    told = sessions(folder)
    for rank, log in enumerate([folder / "events.jsonl", *sorted(folder.glob("events-rank-*.jsonl"))]):
        own = iter([number for number, (_, world_size) in enumerate(told) if rank < world_size])
        end = 0
        for line in read_jsonl(log):
            if line["kind"] == "start":  # of the next session with this rank
                end = min((first for first, _ in told[next(own) + 1 :]), default=NUM_STEPS)
            elif line["kind"] == "micro_batch" and line["event"] == "begin" and line["step"] < end:
                samples.setdefault(line["step"], []).append(line["first_sample_id"])
    return {step: sorted(ids) for step, ids in samples.items()}


def losses(folder: Path) -> dict[int, float]:
    """Return step -> its last recorded loss."""
    return {line["step"]: line["loss"] for line in read_jsonl(folder / "events.jsonl") if line["kind"] == "step"}


def rows(root: Path) -> list[str]:
    """Kill two ranks, resume as one, two and three, and return the table's rows."""
    table = [
        "| ranks | killed after step | resumed at step | same samples in each step | largest difference of a loss |",
        "|--:|--:|--:|---|--:|",
    ]
    draw = random.Random(1)  # noqa: S311 (nothing here is secret)
    through = root / "through"
    start(through, *OPTIONS).wait()
    expected, plain = samples_of_steps(through), losses(through)
    assert sum(map(len, expected.values())) == 2 * len({sample for ids in expected.values() for sample in ids})
    for ranks in ("1", "2", "3"):
        folder = root / ranks
        step = draw.randrange(NUM_STEPS // 2, NUM_STEPS - 1)
        kill_in_step(start(folder, *OPTIONS), folder, step, draw.uniform(0, STEP_SECONDS))
        start(folder, "--resume", "--ranks", ranks).wait()
        found, own = samples_of_steps(folder), losses(folder)
        largest = max(abs(own[step] - loss) / abs(loss) for step, loss in plain.items())
        same = "yes" if found == expected and len(found) == NUM_STEPS else "NO"
        table.append(f"| 2, then {ranks} | {step} | {sessions(folder)[-1][0]} | {same} | {largest:.1e} |")
    return table


def main() -> None:
    """Print the table, and write it to a file if asked."""
    out = report.parser(__doc__).parse_args().out
    with tempfile.TemporaryDirectory() as root:
        report.publish(
            rows(Path(root)),
            title="Two ranks killed, and resumed as one, two and three",
            command="python benchmarks/resume_on_other_ranks.py",
            setting="2 epochs of `digits` in float32, steps counted from 0, differences relative to the whole run",
            out=out,
        )


if __name__ == "__main__":
    main()
