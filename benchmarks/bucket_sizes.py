"""Which bucket size is fastest at several link speeds, and is the common advice of 25 to 50 MB right?

The job of `planted_causes.py`, with layers that sleep like a device and larger gradients, on two hosts with links of
several rates; `anybatch scale` tries its default sizes and those for the model in one process, alternately.

    python benchmarks/bucket_sizes.py [--out benchmarks/results/NAME.md]
"""

import sys
from pathlib import Path

import report
from planted_causes import Case, run_cases

from anybatch.core.units import in_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))  # the hosts come from the tests
from tests.hosts import NoHostsError

MEBIBYTE = 2**20
RATES = ("500mbit", "2gbit", "8gbit")
USUAL = range(25 * MEBIBYTE, 50 * MEBIBYTE + 1)
JOBS = {"32 MiB": {"layers": 16, "width": 720}, "8 MiB": {"layers": 16, "width": 360}}


def main() -> None:
    """Run each job at each rate, and print the table."""
    out = report.parser(__doc__).parse_args().out
    columns = ("gradients", "link", "bucket sizes", "buckets", "ms of a step", "longer than the fastest")
    lines = [f"| {' | '.join(columns)} |", "|---|---|---|--:|--:|--:|"]
    verdicts = []
    for job, size in JOBS.items():
        for rate in RATES:
            case = Case(**size, rate=rate, bucket_bytes=25 * MEBIBYTE, bucket_sizes=None, sample_seconds=0.01)  # type: ignore[arg-type]
            trials = run_cases([case])[0]["report"]["evidence"]["2"]["buckets"]
            best = min(one["step_seconds"] for one in trials)
            for one in trials:
                sizes = ", ".join(dict.fromkeys(map(in_bytes, one["cut"]["sizes"])))
                longer = f"{one['step_seconds'] / best - 1:.0%} ± {one['longer']['uncertainty'] / best:.0%}"
                row = (job, rate, sizes, one["cut"]["num_buckets"], f"{one['step_seconds'] * 1e3:.0f}", longer)
                lines.append(f"| {' | '.join(map(str, row))} |")
                print(lines[-1], flush=True)
            usual = min(one["step_seconds"] for one in trials if any(x in USUAL for x in one["cut"]["sizes"]))
            longer = f"{usual / best - 1:.0%} longer than the fastest"
            verdicts.append(f"- {job} at {rate}: the best of 25 to 50 MiB takes {longer}")
    report.publish(
        [*verdicts, "", *lines],
        title="Bucket sizes by speed of the link",
        command="python benchmarks/bucket_sizes.py",
        setting="2 ranks over gloo, one in each network namespace, compute that sleeps",
        out=out,
    )


if __name__ == "__main__":
    try:
        main()
    except NoHostsError as error:
        sys.exit(str(error))
