"""A training loop in Ray Train: Ray starts the workers and their process group, and each worker runs one rank.

If a worker dies, Ray restarts all of them, up to `max_failures` times, and the loop resumes from its newest checkpoint.
The folder must be shared by all nodes.

    pip install 'anybatch[ray]'
    python examples/ray_train.py --workers 2 --folder /tmp/ray_example
"""

import argparse
from pathlib import Path

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import anybatch as ab
from anybatch.checkpoints import list_checkpoints

BATCH_SIZE = 64
EPOCHS = 3


def train(config: dict[str, str]) -> None:
    """Train in one worker."""
    inputs = torch.randn(1000, 20, generator=torch.Generator().manual_seed(0))
    samples = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
    loss = ab.mean_over_samples(lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]))
    engine = ab.Engine(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss,
        effective_batch_size=BATCH_SIZE,
        micro_batch_size=16,
    )
    if list_checkpoints(config["folder"]):
        engine.load(config["folder"])
    batches = ab.batches(samples, effective_batch_size=BATCH_SIZE, epochs=EPOCHS, seed=0, start=engine.position)
    for batch in batches:
        report = engine.step(batch)
        if report.position.sample_offset == 0:  # the end of an epoch
            engine.save(config["folder"])
            if engine.world.rank == 0:
                print(f"step {engine.num_steps}: loss {report.loss:.6f}")


def main() -> None:
    """Start the workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", default="runs/ray_example")
    given = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(Path(given.folder).absolute())},
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=2)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
