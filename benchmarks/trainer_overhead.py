"""The time of a step of transformers' Trainer alone, with `ab.exact`, and with an effective batch size.

All train a small Llama on the CPU with the same micro-batches: 4 per rank, of 4 samples each. One after another trains
for a few steps in each round, in the same process, so that a busy machine slows all of them alike. The processor time
of rank 0 is shown too, because it depends less on other programs.

    python benchmarks/trainer_overhead.py [--ranks 2] [--rounds 7] [--out benchmarks/results/NAME.md]
"""

import itertools
import os
import statistics
import tempfile
import time
import warnings

import report
import torch
import torch.distributed as dist
import transformers

import anybatch as ab
from anybatch.testing import run_ranks

NUM_STEPS = 16
NUM_WARM_UP = 5  # steps of each training, the first of which finds out which items the loss averages over
MICRO_BATCH_SIZE, ACCUMULATION = 4, 4
NUM_TOKENS = 48
WAYS = ("Trainer", "`ab.exact(trainer)`", "`ab.exact(trainer, effective_batch_size=)`")
Times = tuple[float, float]
"""Seconds, and seconds of the processor."""
Seconds = dict[str, list[Times]]


class Clock(transformers.TrainerCallback):
    """Notes the end of each step."""

    def __init__(self) -> None:
        self.ends: list[Times] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        """Note the time."""
        self.ends.append((time.perf_counter(), time.process_time()))


def seconds_per_step(way: str, num_ranks: int, folder: str) -> Times:
    """Return the median times of a step."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=0,
    )
    ids = torch.randint(3, 512, (MICRO_BATCH_SIZE * ACCUMULATION * num_ranks * NUM_STEPS, NUM_TOKENS))
    clock = Clock()
    args = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=MICRO_BATCH_SIZE,
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=NUM_STEPS,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        ddp_find_unused_parameters=False if num_ranks > 1 else None,
        ddp_backend="gloo" if num_ranks > 1 else None,
    )
    trainer = transformers.Trainer(
        transformers.LlamaForCausalLM(config),
        args,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=[clock],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if way != WAYS[0]:
        size = MICRO_BATCH_SIZE * ACCUMULATION * num_ranks if way == WAYS[2] else None
        ab.exact(trainer, effective_batch_size=size)
    trainer.train()
    ends = clock.ends[NUM_WARM_UP:]
    wall, processor = (
        statistics.median(after[kind] - before[kind] for before, after in itertools.pairwise(ends)) for kind in (0, 1)
    )
    return wall, processor


def measure(num_ranks: int, num_rounds: int) -> Seconds:
    """Return the time of a step in each round; on several ranks, each of them calls it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if num_ranks > 1:
        rank = str(dist.get_rank())
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(num_ranks)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    seconds: Seconds = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(num_rounds + 1):
            for way in WAYS:
                found = seconds_per_step(way, num_ranks, folder)
                if number:  # the first round warms up
                    seconds[way].append(found)
    return seconds


def rows(seconds: Seconds) -> list[str]:
    """Return the table: medians, and the median ratio of neighbouring trainings with its quartiles."""
    lines = ["| steps of | ms | ratio (quartiles) | processor ms | ratio (quartiles) |", "|---|--:|--:|--:|--:|"]
    for way, times in seconds.items():
        cells = []
        for kind in (0, 1):
            ratios = [one[kind] / alone[kind] for one, alone in zip(times, seconds[WAYS[0]], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            milliseconds = statistics.median(one[kind] for one in times) * 1e3
            cells.append(f"{milliseconds:.1f} | {middle:.3f} ({low:.3f} to {high:.3f})")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure and print the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks on this machine")
    parser.add_argument("--rounds", type=int, default=7, help="trainings of each kind")
    args = parser.parse_args()
    if args.ranks == 1:
        seconds = measure(1, args.rounds)
    else:
        outcomes = run_ranks(args.ranks, measure, args.ranks, args.rounds, timeout_seconds=600.0)
        assert not any(outcome.error for outcome in outcomes), outcomes
        seconds = outcomes[0].value
    load = os.getloadavg()[0]
    cores = os.cpu_count()
    report.publish(
        rows(seconds),
        title="The time of a step in transformers' Trainer, with ab.exact",
        command=f"python benchmarks/trainer_overhead.py --ranks {args.ranks} --rounds {args.rounds}",
        setting=(
            f"transformers {transformers.__version__}, {args.ranks} rank(s) with 1 thread each, {cores} cores, "
            f"{args.rounds} rounds, load average {load:.1f}"
        ),
        out=args.out,
    )


if __name__ == "__main__":
    main()
