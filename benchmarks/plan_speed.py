"""The time to plan the memory of small and large models, and the planner's own memory.

Each plan is made in a fresh process, from its start to its end, on one thread: two models on one device, where a plan
traces at two micro-batch sizes and at the answer, and replays the allocator; and two under FSDP2, which need one trace
and the replay. A small Mamba comes from transformers and runs without its kernels: its scan takes the tokens one by
one, so that a step has a hundred times more operations than its layers need.

    python benchmarks/plan_speed.py [--only WORD] [--out benchmarks/results/NAME.md]
    python benchmarks/plan_speed.py --against PATH

With `--against`, plans that both versions support alternate between this checkout and another one, each with its
source and its copy of this script. The comparison is of CPU seconds and of the resulting plans.
"""

import itertools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import report

GIBIBYTE = 1 << 30
DEVICE_BYTES = 80 * GIBIBYTE


@dataclass(frozen=True, slots=True)
class Case:
    """One plan.

    Args:
        description: the plan, in a few words.
        make: function that makes the plan and returns its result.
        target_seconds: the time that a plan should take.
    """

    description: str
    make: Callable[[], str]
    target_seconds: int


def on_one_device(name: str) -> str:
    """Plan without sharding, in bfloat16 under autocast; return the largest micro-batch that fits."""
    import llama  # noqa: PLC0415 (the parent process needs no torch)

    from anybatch.core.units import HEADROOM  # noqa: PLC0415
    from anybatch.planner.envelopes import find_envelopes  # noqa: PLC0415

    usable = int(DEVICE_BYTES * (1.0 - HEADROOM))
    envelopes = find_envelopes(llama.spec(getattr(llama, name), precision="bf16"), usable)
    return f"micro-batch {envelopes.largest_allocated(usable)} on 80 GiB"


def scanned(num_tokens: int, **shape: int) -> str:
    """Plan a Mamba by its configuration; return the largest micro-batch that fits and its tensor memory."""
    import logging  # noqa: PLC0415

    import transformers  # noqa: PLC0415

    import anybatch as ab  # noqa: PLC0415

    logging.disable(logging.WARNING)
    settings = transformers.MambaConfig(**shape, use_cache=False)
    plan = ab.plan(settings, device=DEVICE_BYTES, effective_batch_size=64, sequence_length=num_tokens, proposals=False)
    return f"micro-batch {plan.micro_batch_size}, {plan.baseline.peak.num_bytes:,} bytes of tensors"


def convolved() -> str:
    """Plan a convolutional network; return the largest micro-batch that fits and its tensor memory."""
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    import anybatch as ab  # noqa: PLC0415

    def network() -> nn.Module:
        widths = [3, *(32 * 2 ** (depth // 4) for depth in range(16))]
        pairs = itertools.pairwise(widths)
        blocks = [nn.Sequential(nn.Conv2d(*pair, 3, padding=1), nn.BatchNorm2d(pair[1]), nn.ReLU()) for pair in pairs]
        return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))

    plan = ab.plan(
        network,
        lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1, momentum=0.9),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        (torch.zeros(2, 3, 64, 64), torch.zeros(2, dtype=torch.int64)),
        device=DEVICE_BYTES,
        effective_batch_size=4096,
        proposals=False,
    )
    return f"micro-batch {plan.micro_batch_size}, {plan.baseline.peak.num_bytes:,} bytes of tensors"


def sharded(name: str, checkpointing: str, world_size: int, micro_batch_size: int) -> str:
    """Plan one micro-batch size under FSDP2; return the planned bytes."""
    import llama  # noqa: PLC0415
    import torch  # noqa: PLC0415

    from anybatch.parallel.fsdp import FSDP  # noqa: PLC0415
    from anybatch.parallel.sharding import Sharding  # noqa: PLC0415
    from anybatch.planner.caching_allocator import replay  # noqa: PLC0415
    from anybatch.planner.step_trace import trace_step  # noqa: PLC0415

    shape = replace(getattr(llama, name), checkpointing=checkpointing)
    strategy = partial(FSDP, Sharding(param_dtype=torch.bfloat16), reduction="every_micro_batch")
    spec = replace(llama.spec(shape, world_size=world_size), strategy=strategy)
    trace = trace_step(spec, micro_batch_size).steady
    sizes = [one.num_bytes for one in trace.allocations]
    reserved = replay(trace.events, sizes, pools=trace.pools).peak_reserved_bytes
    return f"{trace.peak_bytes / GIBIBYTE:.1f} GiB of tensors, {reserved / GIBIBYTE:.1f} reserved"


TWO_LAYERS = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 500}
CASES = {
    "124M": Case("0.1 billion, 1 device", lambda: on_one_device("SMALL"), 3),
    "1B": Case("1.3 billion, 1 device", lambda: on_one_device("ONE"), 10),
    "CNN": Case("16 convolutions, 1 device", convolved, 5),
    "Mamba-128": Case("Mamba, 2 layers, 128 tokens", lambda: scanned(128, **TWO_LAYERS), 10),
    "8B-8": Case("8 billion, FSDP2 over 8", lambda: sharded("EIGHT", "selective", 8, 2), 30),
    "8B-128": Case("8 billion, FSDP2 over 128", lambda: sharded("EIGHT", "selective", 128, 2), 30),
    "70B": Case("70 billion, FSDP2 over 64", lambda: sharded("SEVENTY", "full", 64, 1), 60),
}


def in_this_process(name: str) -> None:
    """Make one plan, and print its result and its cost."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    said = CASES[name].make()
    used = resource.getrusage(resource.RUSAGE_SELF)
    peak_bytes = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps({"said": said, "cpu_seconds": used.ru_utime + used.ru_stime, "peak_bytes": peak_bytes}))


def script_of(checkout: Path) -> Path:
    """Return the copy of this script in a checkout."""
    return checkout / "benchmarks" / "plan_speed.py"


def made(name: str, checkout: Path | None = None) -> dict[str, Any]:
    """Plan in a fresh process, with this checkout or another; return the result and its cost."""
    source = Path(__file__).parents[1] if checkout is None else checkout
    environment = {**os.environ, "PYTHONPATH": str(source / "src")}
    command = [sys.executable, str(script_of(source)), name]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def turns(name: str, checkout: Path, num_turns: int) -> str:
    """Plan with this source and another one, interleaved; return the table's row."""
    pairs = [(made(name, checkout), made(name)) for _ in range(num_turns)]
    ratios = sorted(new["cpu_seconds"] / old["cpu_seconds"] for old, new in pairs)
    before, after = (median(pair[side]["cpu_seconds"] for pair in pairs) for side in (0, 1))
    old, new = (pairs[-1][side]["said"] for side in (0, 1))
    same = "the same" if old == new else f"{new}; before {old}"
    between = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    return f"| {CASES[name].description} | {before:.1f} | {after:.1f} | {median(ratios):.2f} | {between} | {same} |"


def row(name: str) -> str:
    """Plan in a fresh process and return the table's row."""
    begun = time.perf_counter()
    found = made(name)
    seconds = time.perf_counter() - begun
    case = CASES[name]
    size = found["peak_bytes"] / GIBIBYTE
    times = f"{seconds:.1f} | {found['cpu_seconds']:.1f} | {case.target_seconds}"
    return f"| {case.description} | {times} | {size:.2f} | {found['said']} |"


def main() -> None:
    """Print the table, and write it to a file if asked."""
    if len(sys.argv) > 1 and sys.argv[1] in CASES:
        in_this_process(sys.argv[1])
        return
    parser = report.parser(__doc__)
    parser.add_argument("--only", default="", help="plan only what has this word in it")
    parser.add_argument("--against", type=Path, help="another checkout, to compare with in turns")
    parser.add_argument("--turns", type=int, default=3, help="with --against (default: 3)")
    options = parser.parse_args()
    names = [name for name in CASES if options.only in name]
    load = f"{os.getloadavg()[0]:.1f} programs ran on {os.cpu_count()} cores before"
    if options.against is not None:
        known = script_of(options.against).read_text(encoding="utf-8")
        names = [name for name in names if f'"{name}": Case(' in known]
        head = "| model | before, s of the CPU | after | ratio | from, to | what is said |"
        lines = [head, "|---|--:|--:|--:|--:|---|"]
        lines += [turns(name, options.against, options.turns) for name in names]
    else:
        head = "| model | seconds | of them on the CPU | aim | memory of the planner, GiB | what it says |"
        lines = [head, "|---|--:|--:|--:|--:|---|", *map(row, names)]
    report.publish(
        lines,
        title="Planning memory: how long it takes, and how much memory",
        command=f"python benchmarks/plan_speed.py {' '.join(sys.argv[1:])}".rstrip(),
        setting=f"a fresh process for each plan, one thread; seconds include its start; {load}",
        out=options.out,
    )


if __name__ == "__main__":
    main()
