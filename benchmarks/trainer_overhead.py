"""The time of a step of transformers' Trainer, Accelerate and Lightning, alone and with anybatch.

All train a small Llama on the CPU with the same micro-batches: 4 per rank, of 4 samples each. One after another trains
for a few steps in each round, in the same process, so that a busy machine slows all of them alike. The processor time
of rank 0 is shown too, because it depends less on other programs.

    python benchmarks/trainer_overhead.py [--host Lightning] [--ranks 2] [--rounds 7] [--out benchmarks/results/NAME.md]
"""

import itertools
import logging
import os
import statistics
import tempfile
import time
import warnings
from typing import Any

import accelerate
import lightning
import report
import torch
import torch.distributed as dist
import transformers
from torch.utils.data import DataLoader

import anybatch as ab
from anybatch.testing import run_ranks

NUM_STEPS = 16
NUM_WARM_UP = 5  # steps of each training, the first of which finds out which items the loss averages over
MICRO_BATCH_SIZE, ACCUMULATION = 4, 4
NUM_TOKENS = 48
WAYS = {
    "Trainer": ("alone", "`ab.exact(trainer)`", "`ab.exact(trainer, effective_batch_size=)`"),
    "Accelerate": ("alone", "`ab.windows`", "`ab.windows(...)`, `window.backward`"),
    "Lightning": ("alone", "`ab.exact(effective_batch_size=)`"),
}
Times = tuple[float, float]
"""Seconds, and seconds of the processor."""
Seconds = dict[str, list[Times]]
Row = dict[str, torch.Tensor]


class Clock(transformers.TrainerCallback):
    """Records the end of each step."""

    def __init__(self) -> None:
        self.ends: list[Times] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        """Record the time."""
        self.ends.append((time.perf_counter(), time.process_time()))


class LightningClock(lightning.Callback):
    """Records the end of each step."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.last = clock, 0

    def on_train_batch_end(self, trainer: Any, *_: object) -> None:  # noqa: ANN401
        """Record the time if the step is complete."""
        if trainer.global_step > self.last:
            self.last = trainer.global_step
            self.clock.on_step_end()


class Module(lightning.LightningModule):
    """Trains a model of transformers."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Row) -> torch.Tensor:
        """Return the mean loss."""
        return torch.as_tensor(self.model(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an AdamW optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def network() -> torch.nn.Module:
    """Return a small Llama."""
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
    return transformers.LlamaForCausalLM(config)


def train_in_trainer(way: str, rows: list[Row], num_ranks: int, folder: str, clock: Clock) -> None:
    """Train in transformers' Trainer."""
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
    trainer = transformers.Trainer(network(), args, train_dataset=rows, callbacks=[clock])
    trainer.remove_callback(transformers.PrinterCallback)
    if way != WAYS["Trainer"][0]:
        size = MICRO_BATCH_SIZE * ACCUMULATION * num_ranks if way == WAYS["Trainer"][2] else None
        ab.exact(trainer, effective_batch_size=size)
    trainer.train()


def train_in_accelerate(way: str, rows: list[Row], num_ranks: int, _: str, clock: Clock) -> None:
    """Train in a loop of Accelerate."""
    alone = way == WAYS["Accelerate"][0]
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION if alone else 1)
    plain = network()
    loader = DataLoader(rows, batch_size=MICRO_BATCH_SIZE, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-4), loader)
    if alone:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                clock.on_step_end()
        return
    for window in ab.windows(accelerator, loader, effective_batch_size=MICRO_BATCH_SIZE * ACCUMULATION * num_ranks):
        if way == WAYS["Accelerate"][1]:
            for batch in window.micro_batches(model):
                accelerator.backward(window.scale(model(**batch).loss, batch))
                optimizer.step()
                optimizer.zero_grad()
        else:
            window.backward(lambda batch: model(**batch).loss, model)
            optimizer.step()
            optimizer.zero_grad()
        clock.on_step_end()


def train_in_lightning(way: str, rows: list[Row], num_ranks: int, folder: str, clock: Clock) -> None:
    """Train in Lightning's Trainer."""
    alone = way == WAYS["Lightning"][0]
    exact = [] if alone else [ab.exact(effective_batch_size=MICRO_BATCH_SIZE * ACCUMULATION * num_ranks)]
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy="ddp" if num_ranks > 1 else "auto",
        accumulate_grad_batches=ACCUMULATION if alone else 1,
        max_steps=NUM_STEPS,
        callbacks=[*exact, LightningClock(clock)],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(network()), DataLoader(rows, batch_size=MICRO_BATCH_SIZE, shuffle=True))  # type: ignore[arg-type]


HOSTS = {
    "Trainer": f"transformers {transformers.__version__}",
    "Accelerate": f"Accelerate {accelerate.__version__}",
    "Lightning": f"Lightning {lightning.__version__}",
}
TRAIN = {"Trainer": train_in_trainer, "Accelerate": train_in_accelerate, "Lightning": train_in_lightning}


def seconds_per_step(host: str, way: str, num_ranks: int, folder: str) -> Times:
    """Return the median times of a step."""
    torch.manual_seed(0)
    ids = torch.randint(3, 512, (MICRO_BATCH_SIZE * ACCUMULATION * num_ranks * NUM_STEPS, NUM_TOKENS))
    clock = Clock()
    TRAIN[host](way, [{"input_ids": row, "labels": row} for row in ids], num_ranks, folder, clock)
    ends = clock.ends[NUM_WARM_UP:]
    wall, processor = (
        statistics.median(after[kind] - before[kind] for before, after in itertools.pairwise(ends)) for kind in (0, 1)
    )
    return wall, processor


def measure(host: str, num_ranks: int, num_rounds: int) -> Seconds:
    """Return the time of a step in each round; on several ranks, each of them calls it."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if num_ranks > 1:
        rank = str(dist.get_rank())
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(num_ranks)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    seconds: Seconds = {way: [] for way in WAYS[host]}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(num_rounds + 1):
            for way in WAYS[host]:
                found = seconds_per_step(host, way, num_ranks, folder)
                if number:  # the first round warms up
                    seconds[way].append(found)
    return seconds


def rows(seconds: Seconds) -> list[str]:
    """Return the table: medians, and the median ratio of neighbouring trainings with its quartiles."""
    lines = ["| steps of | ms | ratio (quartiles) | processor ms | ratio (quartiles) |", "|---|--:|--:|--:|--:|"]
    for way, times in seconds.items():
        cells = []
        for kind in (0, 1):
            ratios = [one[kind] / alone[kind] for one, alone in zip(times, seconds["alone"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            milliseconds = statistics.median(one[kind] for one in times) * 1e3
            cells.append(f"{milliseconds:.1f} | {middle:.3f} ({low:.3f} to {high:.3f})")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure and print the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--host", choices=WAYS, default="Trainer", help="library that trains")
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks on this machine")
    parser.add_argument("--rounds", type=int, default=7, help="trainings of each kind")
    args = parser.parse_args()
    if args.ranks == 1:
        seconds = measure(args.host, 1, args.rounds)
    else:
        outcomes = run_ranks(args.ranks, measure, args.host, args.ranks, args.rounds, timeout_seconds=600.0)
        assert not any(outcome.error for outcome in outcomes), outcomes
        seconds = outcomes[0].value
    load = os.getloadavg()[0]
    cores = os.cpu_count()
    report.publish(
        rows(seconds),
        title=f"The time of a step in {args.host}, alone and with anybatch",
        command=f"python benchmarks/trainer_overhead.py --host {args.host} --ranks {args.ranks} --rounds {args.rounds}",
        setting=(
            f"{HOSTS[args.host]}, {args.ranks} rank(s) with 1 thread each, {cores} cores, "
            f"{args.rounds} rounds, load average {load:.1f}"
        ),
        out=args.out,
    )


if __name__ == "__main__":
    main()
