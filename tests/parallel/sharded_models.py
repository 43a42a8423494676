"""Models with every parameter layout that sharding must support, and plain PyTorch references."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.parallel.dtensors import gather
from anybatch.parallel.fsdp import FSDP
from anybatch.testing import relative_error
from tests.engine.cases import Batch, InMemory, vectors

WIDTH, NUM_BLOCKS = 6, 3
NUM_SAMPLES = 11
RARE_ABOVE = 0.9  # so that some micro-batches have such a sample, and some ranks have none


class Block(nn.Module):
    """A residual layer, a parameter with a single row, and optionally a layer used for few samples."""

    def __init__(self, *, leaves_some: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.randn(1, WIDTH))
        self.rare = nn.Linear(WIDTH, WIDTH) if leaves_some else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = hidden + torch.tanh(self.inner(hidden)) * self.gain
        if self.rare is not None:
            chosen = hidden[:, 0] > RARE_ABOVE
            if chosen.any():
                out = torch.where(chosen[:, None], self.rare(out), out)
        return out


class Tower(nn.Module):
    """Blocks between two layers, in a given form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block(leaves_some=form == "unused") for _ in range(NUM_BLOCKS))
        self.last = nn.Linear(WIDTH, 4)
        self.temperature = nn.Parameter(torch.tensor(0.7)) if form == "number" else None
        if form == "tied":
            self.last = nn.Linear(WIDTH, WIDTH)
            self.middle = nn.Linear(WIDTH, WIDTH, bias=False)
            self.middle.weight = self.last.weight
        if form == "shared with a block":
            self.last = nn.Linear(WIDTH, WIDTH)
            shared: Any = self.blocks[1]
            self.last.weight = shared.inner.weight
        if form == "frozen":
            self.first.requires_grad_(requires_grad=False)
            self.blocks[1].requires_grad_(requires_grad=False)
            self.blocks[2].gain.requires_grad_(False)
        if form == "unused":
            self.idle = nn.Linear(2, 2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input of the last layer."""
        hidden: torch.Tensor = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        if self.form == "tied":
            hidden = torch.tanh(self.middle(hidden))
        return hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.encode(x))
        return out if self.temperature is None else out * self.temperature


FORMS = ("plain", "tied", "shared with a block", "frozen", "number", "unused", "methods")
"""Forms of a model. In "methods" the loss calls methods of the model, never the model itself."""


def tower(form: str) -> Tower:
    """Return the same model of a form each time."""
    torch.default_generator.manual_seed(5)
    return Tower(form).double()


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """Return the mean loss over the samples."""
    logits = model.last(model.encode(batch["x"])) if model.form == "methods" else model(batch["x"])
    return F.cross_entropy(logits[:, :4], batch["y"])


def sgd(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Build an optimizer with state; weight decay moves parameters even with a zero gradient."""
    return torch.optim.SGD(named, lr=0.1, momentum=0.9, weight_decay=0.1)


def plain(form: str, batch: Batch, num_steps: int, limit: float) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the first gradient, and the parameters after some clipped updates, in plain PyTorch."""
    model = tower(form)
    optimizer, first = sgd(model.named_parameters()), None
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if first is None:
            first = {n: None if p.grad is None else p.grad.clone() for n, p in trainable(model).items()}
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
    assert first is not None
    return first, {name: parameter.detach() for name, parameter in model.named_parameters()}


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def whole(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
    """Return the full tensors of sharded ones."""
    return {name: None if tensor is None else gather(tensor.detach()) for name, tensor in tensors.items()}


def errors_of(
    form: str,
    options: Mapping[str, Any],
    prepare: Callable[[Tower], None] = lambda _: None,
) -> list[float]:
    """Run on every rank: return the errors of the gradient and of the parameters after two clipped updates.

    `options` are of the strategy; `prepare` changes the model before the engine is built, like a user's code.
    """
    batch, limit = vectors(NUM_SAMPLES), 0.05
    expected, end = plain(form, batch, 2, limit)
    model = tower(form)
    prepare(model)
    with ab.Engine(
        model,
        sgd,
        ab.mean_over_samples(loss_of),
        micro_batch_size=2,
        strategy=FSDP(**options),
        clip=limit,
        world=ab.World.from_environment(),
    ) as engine:
        found = whole(engine.gradients(InMemory(batch)))
        for _ in range(2):
            engine.step(InMemory(batch))
        after = whole(dict(model.named_parameters()))
    return [relative_error(found, expected), relative_error(after, end)]
