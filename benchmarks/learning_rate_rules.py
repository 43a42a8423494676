"""Study."""

import argparse
import itertools
from pathlib import Path

import torch
from small_runs import Runs, Setting, task_of

SEEDS = range(5)
MEMORY = {"SGD": (0.9,), "AdamW": (0.9, 0.99)}
EPS = {"SGD": 0.0, "AdamW": 1e-8}


def grid(name, optimizer):
    task = task_of(name)
    for seed, rate, size in itertools.product(SEEDS, task.rates[optimizer], task.batch_sizes):
        yield Setting(
            task=name,
            optimizer=optimizer,
            batch_size=size,
            learning_rate=rate,
            betas=MEMORY[optimizer],
            eps=EPS[optimizer],
            seed=seed,
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    p = argparse.ArgumentParser()
    p.add_argument("--runs", type=Path)
    p.add_argument("--seconds", type=float)
    a = p.parse_args()
    import time, sys

    end = time.monotonic() + a.seconds
    runs = Runs(a.runs)
    for name in ("digits", "text"):
        for optimizer in ("SGD", "AdamW"):
            for s in grid(name, optimizer):
                runs(s)
                if time.monotonic() > end:
                    sys.exit(3)
