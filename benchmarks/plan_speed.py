"""How long it takes to plan the memory of small and large models, and how much memory the planner itself takes.

Each plan is made in a fresh process, from its start to its end, on one thread: two models on one device, where a plan
is traces at two micro-batch sizes, one more at the answer, and the allocator's replay; and two under FSDP2, where it is
one trace and the replay.

    python benchmarks/plan_speed.py [--out benchmarks/results/NAME.md]
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import report

GIBIBYTE = 1 << 30
DEVICE_BYTES = 80 * GIBIBYTE


@dataclass(frozen=True, slots=True)
class Case:
    """One plan.

    Args:
        words: what is planned.
        make: makes the plan; returns what it says.
        aim_seconds: how long it may take.
    """

    words: str
    make: Callable[[], str]
    aim_seconds: int


def on_one_device(name: str) -> str:
    """Plan without sharding, in bfloat16 under autocast; return the largest micro-batch that fits."""
    import llama  # noqa: PLC0415 (the parent process needs no torch)

    from anybatch.core.headroom import HEADROOM  # noqa: PLC0415
    from anybatch.planner.envelopes import find_envelopes  # noqa: PLC0415

    usable = int(DEVICE_BYTES * (1.0 - HEADROOM))
    envelopes = find_envelopes(llama.spec(getattr(llama, name), precision="bf16"), usable)
    return f"micro-batch {envelopes.largest_allocated(usable)} on 80 GiB"


def sharded(name: str, checkpointing: str, world_size: int, micro_batch_size: int) -> str:
    """Plan one micro-batch size under FSDP2; return what is held."""
    import llama  # noqa: PLC0415
    import torch  # noqa: PLC0415

    from anybatch.parallel.fsdp import FSDP  # noqa: PLC0415
    from anybatch.parallel.sharding import Sharding  # noqa: PLC0415
    from anybatch.planner.cost.caching_allocator import replay  # noqa: PLC0415
    from anybatch.planner.trace.step_trace import trace_step  # noqa: PLC0415

    shape = replace(getattr(llama, name), checkpointing=checkpointing)
    strategy = partial(FSDP, Sharding(param_dtype=torch.bfloat16), reduction="every_micro_batch")
    spec = replace(llama.spec(shape, world_size=world_size), strategy=strategy)
    trace = trace_step(spec, micro_batch_size).steady
    sizes = [one.num_bytes for one in trace.allocations]
    reserved = replay(trace.events, sizes, pools=trace.pools).peak_reserved_bytes
    return f"{trace.peak_bytes / GIBIBYTE:.1f} GiB of tensors, {reserved / GIBIBYTE:.1f} reserved"


CASES = {
    "124M": Case("0.1 billion, 1 device", lambda: on_one_device("SMALL"), 3),
    "1B": Case("1.3 billion, 1 device", lambda: on_one_device("ONE"), 10),
    "8B-8": Case("8 billion, FSDP2 over 8", lambda: sharded("EIGHT", "selective", 8, 2), 30),
    "8B-128": Case("8 billion, FSDP2 over 128", lambda: sharded("EIGHT", "selective", 128, 2), 30),
    "70B": Case("70 billion, FSDP2 over 64", lambda: sharded("SEVENTY", "full", 64, 1), 60),
}


def in_this_process(name: str) -> None:
    """Make one plan and print what it took."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    said = CASES[name].make()
    used = resource.getrusage(resource.RUSAGE_SELF)
    peak_bytes = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps({"said": said, "cpu_seconds": used.ru_utime + used.ru_stime, "peak_bytes": peak_bytes}))


def row(name: str) -> str:
    """Plan in a fresh process and return the table's row."""
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, __file__, name], check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - begun
    found = json.loads(done.stdout.splitlines()[-1])
    case = CASES[name]
    size = found["peak_bytes"] / GIBIBYTE
    times = f"{seconds:.1f} | {found['cpu_seconds']:.1f} | {case.aim_seconds}"
    return f"| {case.words} | {times} | {size:.2f} | {found['said']} |"


def main() -> None:
    """Print the table, and write it to a file if asked."""
    if len(sys.argv) > 1 and sys.argv[1] in CASES:
        in_this_process(sys.argv[1])
        return
    out = report.parser(__doc__).parse_args().out
    load = f"{os.getloadavg()[0]:.1f} programs ran on {os.cpu_count()} cores before"
    head = "| model | seconds | of them on the CPU | aim | memory of the planner, GiB | what it says |"
    lines = [head, "|---|--:|--:|--:|--:|---|", *map(row, CASES)]
    report.publish(
        lines,
        title="Planning memory: how long it takes, and how much memory",
        command="python benchmarks/plan_speed.py",
        setting=f"a fresh process for each plan, one thread; seconds include its start; {load}",
        out=out,
    )


if __name__ == "__main__":
    main()
