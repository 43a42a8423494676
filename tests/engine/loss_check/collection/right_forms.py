# mypy: ignore-errors
"""Right setups with derivatives in the loss, batches of other forms, pairs and groups."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from tests.engine.loss_check.collection.right_models import flat_loss, ids
from tests.engine.loss_check.collection.setups import (
    LENGTH,
    NUM_CLASSES,
    NUM_SAMPLES,
    WIDTH,
    Net,
    Table,
    classify,
    mean_over_words,
    pooled,
    score,
)

TABLE = Table()
add = TABLE.add

# Derivatives inside the loss


@TABLE.loss("gradient penalty")
def penalised(m, b):
    x = b["x"].clone().requires_grad_()
    out = m(x)
    (slope,) = torch.autograd.grad(out.logsumexp(-1).sum(), x, create_graph=True)
    return F.cross_entropy(out.mean(1), b["y"]) + 0.1 * (slope.flatten(1).norm(dim=1) - 1).square().mean()


@TABLE.loss("MAML", model=lambda: Net(dropout=0.0))
def maml(m, b):
    own, total = dict(m.named_parameters()), 0.0
    for x, y in zip(b["x"], b["y"], strict=True):
        inner = F.cross_entropy(torch.func.functional_call(m, own, (x[None],)).mean(1), y[None])
        slopes = torch.autograd.grad(inner, list(own.values()), create_graph=True)
        moved = {name: q - 0.1 * s for (name, q), s in zip(own.items(), slopes, strict=True)}
        total = total + F.cross_entropy(torch.func.functional_call(m, moved, (x[None] + 0.1,)).mean(1), y[None])
    return total / len(b["x"])


@TABLE.loss("forces", model=lambda: Net(1, dropout=0.0))
def forces(m, b):
    x = b["x"].clone().requires_grad_()
    (force,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
    return (force[..., 0].mean(1) - b["target"]).square().mean()


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = Net(WIDTH // 2), Net(WIDTH // 2)
        self.scale.body[0] = self.shift.body[0] = nn.Linear(WIDTH // 2, 8)

    def forward(self, x):
        one, other = x.chunk(2, -1)
        scale = torch.tanh(self.scale(one))
        return torch.cat([one, other * scale.exp() + self.shift(one)], -1), scale.sum((-1, -2))


add(
    "likelihood of a flow",
    lambda m, b: (lambda z, volume: (0.5 * z.square().sum((1, 2)) - volume).mean())(*m(b["x"])),
    model=Flow,
)


@TABLE.loss("gradients of samples by vmap")
def by_vmap(m, b):
    own = dict(m.named_parameters())

    def of_sample(x, y):
        return F.cross_entropy(torch.func.functional_call(m, own, (x[None],)).mean(1), y[None])

    slopes = torch.func.vmap(torch.func.grad(of_sample), randomness="different")(b["x"], b["y"])
    return classify(m, b) + 0.1 * slopes.flatten(1).square().sum(1).mean()


@TABLE.loss("derivative by jvp", model=lambda: Net(WIDTH, dropout=0.0))
def by_jvp(m, b):
    value, slope = torch.func.jvp(m, (b["x"],), (torch.randn_like(b["x"]),))
    return (value - 0.1 * slope).square().mean()


# Batches of other forms, pairs and groups


def detection():
    g = torch.Generator().manual_seed(2)
    numbers = [int(torch.randint(1, 5, (), generator=g)) for _ in range(NUM_SAMPLES)]
    images = [torch.randn(WIDTH, generator=g) for _ in numbers]
    return images, [{"boxes": torch.randn(number, NUM_CLASSES, generator=g)} for number in numbers]


@TABLE.loss(
    "boxes in lists",
    declare=lambda f: ab.mean_over(f, lambda b: sum(len(one["boxes"]) for one in b[1])),
    batch=detection,
)
def boxes(m, b):
    outputs = m(torch.stack(list(b[0])))
    return torch.cat([(out - one["boxes"]).abs().sum(1) for out, one in zip(outputs, b[1], strict=True)]).mean()


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(NUM_CLASSES + 1, 8), nn.Linear(8, NUM_CLASSES)
        self.inner = nn.Transformer(8, 2, 1, 1, 16, dropout=0.2, batch_first=True)

    def forward(self, one, other):
        mask = nn.Transformer.generate_square_subsequent_mask(other.shape[1], dtype=self.out.weight.dtype)
        return self.out(self.inner(self.embed(one), self.embed(other), tgt_mask=mask))


add(
    "sequence to sequence",
    lambda m, b: F.cross_entropy(m(ids(b), ids(b).roll(1, 1)).flatten(0, 1), b["labels"].flatten()),
    mean_over_words,
    model=Translator,
)


def neighbours(s):
    return -F.logsigmoid(s[0::2] - s[1::2]).mean()


def even(s):
    if len(s) % 2:
        message = "rows come in pairs"
        raise ValueError(message)
    return s


add("pairs of neighbours", lambda m, b: neighbours(even(score(m, b))))
add("pairs of neighbours that broadcast", lambda m, b: neighbours(score(m, b)))


@TABLE.loss("normalised groups of four")
def groups(m, b):
    r = b["target"].view(-1, 4)
    gain = ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).flatten()
    return -(gain * pooled(m, b).log_softmax(-1)[:, 0]).mean()


add("preference in a row", lambda m, b: -F.logsigmoid(0.1 * (m(b["x"])[:, 0, 0] - m(b["x"])[:, 1, 0])).mean())


@TABLE.loss("two passes with dropout")
def twice(m, b):
    one, other = pooled(m, b), pooled(m, b)
    return F.cross_entropy(one, b["y"]) + F.kl_div(one.log_softmax(-1), other.softmax(-1), reduction="batchmean")


def stacked(m, b, noise):
    x = torch.cat([b["x"], b["x"] * 0.5])
    return F.cross_entropy(m(x + noise * torch.randn_like(x)).mean(1), torch.cat([b["y"], b["y"]]))


add("two stacked views", lambda m, b: stacked(m, b, 0.0))
add("noise on two stacked views", lambda m, b: stacked(m, b, 0.1))
add(
    "one random factor of numpy, used once",
    lambda m, b: classify(m, {**b, "x": b["x"] * float(np.random.rand() + 0.5)}),
)
add("one random factor of Python, used once", lambda m, b: classify(m, {**b, "x": b["x"] * (random.random() + 0.5)}))


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature, self.projection = nn.Parameter(torch.tensor(0.3)), nn.Linear(NUM_CLASSES, NUM_CLASSES)

    def forward(self, m, b):
        return F.cross_entropy(self.projection(pooled(m, b)) * self.temperature.exp(), b["y"])


add("loss with parameters", Criterion)
add(
    "models by name",
    lambda m, b: classify(m["d"], b) + 0.1 * pooled(m["g"], b).square().mean(),
    model=lambda: {"g": Net(), "d": Net()},
)


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(LENGTH // 2 + 1, WIDTH, dtype=torch.cfloat))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x):
        return self.head(torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.filter, n=x.shape[1], dim=1).to(x.dtype)).mean(
            1
        )


add("complex weights", flat_loss, model=Spectrum, dtypes=("float32",))


class Graphs:
    """Graphs with all nodes in one row: they can be cut, but not reordered."""

    def __init__(self, x, sizes, y):
        self.x, self.sizes, self.y = x, sizes, y

    def __len__(self):
        return len(self.y)

    def to(self, *_):
        return self

    def slice_samples(self, start, stop):
        ends = [0, *torch.tensor(self.sizes).cumsum(0).tolist()]
        return Graphs(self.x[ends[start] : ends[stop]], self.sizes[start:stop], self.y[start:stop])


def graphs():
    g = torch.Generator().manual_seed(0)
    sizes = [2 + number % 5 for number in range(NUM_SAMPLES)]
    return Graphs(
        torch.randn(sum(sizes), WIDTH, generator=g), sizes, torch.randint(0, NUM_CLASSES, (NUM_SAMPLES,), generator=g)
    )


@TABLE.loss("graphs", batch=graphs, dtypes=("float32",))
def of_graphs(m, b):
    which = torch.arange(len(b.y)).repeat_interleave(torch.tensor(b.sizes))
    return F.cross_entropy(torch.zeros(len(b.y), NUM_CLASSES).index_add(0, which, m(b.x)), b.y)


add(
    "nodes of graphs",
    lambda m, b: F.cross_entropy(m(b.x), b.y.repeat_interleave(torch.tensor(b.sizes))),
    lambda f: ab.mean_over(f, lambda b: len(b.x)),
    batch=graphs,
    dtypes=("float32",),
)
