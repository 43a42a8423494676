"""A small module for Lightning that compares the gradient of every optimizer step with that of its samples."""

import os
import warnings
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import anybatch as ab
from anybatch.core.tensors import relative_error
from anybatch.data.indexed import sample_order

NUM_SAMPLES, SIZE, MICRO = 27, 13, 3
LENGTHS = [2 + 5 * number % 11 for number in range(NUM_SAMPLES)]
Sample = dict[str, Tensor]
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def samples() -> list[Sample]:
    """Return rows of different lengths; the first token is the number of the sample."""
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(NUM_SAMPLES, (length,), generator=generator) for length in LENGTHS]
    for number, row in enumerate(rows):
        row[0] = number
    return [{"words": row, "labels": row % 5, "kind": row.sum() % 3} for row in rows]


def collate(rows: Sequence[Sample]) -> Sample:
    """Pad rows to the longest, with labels of -100."""

    def padded(name: str, value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)

    kinds = torch.stack([row["kind"] for row in rows])
    return {"words": padded("words", 0), "labels": padded("labels", -100), "kind": kinds}


def loader(rows: Any = None, **options: Any) -> DataLoader[Any]:
    """Return a loader of micro-batches."""
    dataset: Any = samples() if rows is None else rows
    return DataLoader(dataset, collate_fn=collate, **{"batch_size": MICRO, "shuffle": True, **options})


def over_tokens(net: nn.Module, batch: Sample) -> Tensor:
    """Return the mean over the tokens of a batch."""
    return F.cross_entropy(net(batch["words"]).flatten(0, 1), batch["labels"].flatten())


def over_samples(net: nn.Module, batch: Sample) -> Tensor:
    """Return the mean over the samples of a batch."""
    scores = net(batch["words"]) * (batch["labels"] != -100)[..., None]
    return F.cross_entropy(scores.sum(1)[:, :3], batch["kind"])


LOSSES = {"tokens": over_tokens, "samples": over_samples}


def full(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def make_net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return a network that scores tags for each token."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(NUM_SAMPLES, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5)).to(dtype)


class Module(pl.LightningModule):  # type: ignore[misc]
    """Trains a network, and compares the gradient of each optimizer step with that of its samples in one batch.

    Args:
        loss: a name in `LOSSES`.
        lr: learning rate.
        fail_at: rank, call of `training_step`, and "forward" or "backward", where memory runs out.
        sync_dist: whether the logged loss is a mean over ranks.
        shard: whether the network is sharded with FSDP2.
        dtype: of the network.
    """

    def __init__(
        self,
        loss: str = "tokens",
        *,
        lr: float = 0.5,
        fail_at: tuple[int, int, str] | None = None,
        sync_dist: bool = False,
        shard: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.net = make_net(dtype)
        self.loss, self.lr, self.fail_at, self.sync_dist, self.shard = LOSSES[loss], lr, fail_at, sync_dist, shard
        self.samples = samples()
        self.calls = 0
        self.seen: set[int] = set()
        self.errors: list[float] = []
        self.ids: list[list[int]] = []
        self.losses: list[float] = []
        self.logged: list[float] = []
        self.outputs: list[Any] = []
        self.rates: list[float] = []

    def configure_model(self) -> None:
        if self.shard and not hasattr(self.net, "unshard"):
            for layer in (self.net[1], self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=self.lr, momentum=0.9)

    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        del batch_idx
        self.calls += 1
        self.seen.update(batch["words"][:, 0].tolist())
        phase = self.fail_at[2] if self.fail_at and self.fail_at[:2] == (self.global_rank, self.calls) else ""
        if phase == "forward":
            self.run_out()
        loss = self.loss(self.net, batch)
        if phase == "backward":
            loss.register_hook(self.run_out)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=self.sync_dist)
        return loss

    def run_out(self, *_: Tensor) -> None:
        message = "staged"
        raise torch.OutOfMemoryError(message)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        seen: list[set[int]] = [self.seen]
        if self.trainer.world_size > 1:
            seen = [set()] * self.trainer.world_size
            dist.all_gather_object(seen, self.seen)
        self.seen = set()
        self.ids.append(sorted(set().union(*seen)))
        twin = make_net(self.net[1].weight.dtype)  # type: ignore[arg-type]
        twin.load_state_dict({name: full(value) for name, value in self.net.state_dict().items()})
        with torch.enable_grad():
            loss = self.loss(twin, collate([self.samples[number] for number in self.ids[-1]]))
            loss.backward()
        found = {name: full(p.grad) for name, p in self.net.named_parameters() if p.grad is not None}
        self.errors.append(relative_error(found, {name: p.grad for name, p in twin.named_parameters()}))
        self.losses.append(float(loss.detach()))
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, outputs: Any, batch: Sample, batch_idx: int) -> None:  # noqa: ARG002 (Lightning's)
        self.outputs.append(outputs)

    def weights(self) -> Tensor:
        """Return all parameters in one tensor."""
        return torch.cat([full(p.detach()).flatten() for p in self.net.parameters()])


def fit(
    module: Module,
    *callbacks: Any,
    ckpt_path: Any = None,
    data: Any = None,
    size: int = SIZE,
    count: Any = None,
    **options: Any,
) -> pl.Trainer:
    """Train, with a callback of effective batches, and return the trainer."""
    exact = ab.exact(effective_batch_size=size, count=count)
    trainer = pl.Trainer(callbacks=[exact, *callbacks], **{**QUIET, "devices": 1, "max_epochs": 1, **options})
    trainer.fit(module, loader() if data is None else data, ckpt_path=ckpt_path)
    return trainer


def expected_ids(seed: int, epoch: int = 0) -> list[list[int]]:
    """Return the samples of each step of an epoch."""
    order = sample_order(NUM_SAMPLES, seed=seed, epoch=epoch, shuffle=True).tolist()
    return [sorted(order[start : start + SIZE]) for start in range(0, NUM_SAMPLES, SIZE)]


def as_rank() -> dict[str, Any]:
    """Prepare a process that has joined a group for Lightning, and return options of the trainer."""
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # Lightning asks for them, but the group exists
    warnings.simplefilter("ignore")  # of Lightning and DDP
    return {"devices": dist.get_world_size(), "plugins": [LightningEnvironment()], "strategy": "ddp"}
