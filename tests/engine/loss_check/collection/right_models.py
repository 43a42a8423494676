# mypy: ignore-errors
"""Right setups that are hard to check: layers that normalise, draw or branch, and other ways to run a model."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.engine.loss_check.collection.setups import (
    LENGTH,
    NUM_CLASSES,
    WIDTH,
    Net,
    Table,
    classify,
    mean_over_words,
    pooled,
    tag,
)

TABLE = Table()
add = TABLE.add

# Normalisation and recurrent layers


def flat_loss(m, b):
    return F.cross_entropy(m(b["x"]), b["y"])


def perceptron(norm):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(LENGTH * WIDTH, 8), norm, nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, NUM_CLASSES)
    )


add("BatchNorm", flat_loss, model=lambda: perceptron(nn.BatchNorm1d(8)))
add("BatchNorm without statistics", flat_loss, model=lambda: perceptron(nn.BatchNorm1d(8, track_running_stats=False)))
NORMS = {
    "GroupNorm": lambda: nn.GroupNorm(2, 8),
    "InstanceNorm": lambda: nn.InstanceNorm1d(8, affine=True),
    "LayerNorm": lambda: nn.LayerNorm(LENGTH),
    "BatchNorm": lambda: nn.BatchNorm1d(8),
}


def convolution(norm):
    return nn.Sequential(
        nn.Conv1d(WIDTH, 8, 3, padding=1),
        norm(),
        nn.GELU(),
        nn.Dropout1d(0.2),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(8, NUM_CLASSES),
    )


for name, norm in NORMS.items():
    add(
        f"convolution, {name}",
        lambda m, b: F.cross_entropy(m(b["x"].transpose(1, 2)), b["y"]),
        model=lambda norm=norm: convolution(norm),
    )


class Packed(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(WIDTH, 8, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        found = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]
        return self.head(found.sum(1) / lengths[:, None])


for kind in (nn.LSTM, nn.GRU, nn.RNN):
    add(
        f"packed {kind.__name__}",
        lambda m, b: F.cross_entropy(m(b["x"], b["lengths"]), b["y"]),
        model=lambda kind=kind: Packed(kind),
    )


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.drop, self.head = nn.LSTM(WIDTH, 8, 2, dropout=0.2), nn.Dropout(0.3), nn.Linear(8, NUM_CLASSES)

    def forward(self, x):
        return self.head(self.drop(self.rnn(x.transpose(0, 1))[0])).mean(0)


def encoder(**options):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, **options), 2)


add("LSTM, time first", flat_loss, model=TimeFirst)
add(
    "transformer, time first",
    lambda m, b: m(b["x"].transpose(0, 1)).square().mean((0, 2)).mul(b["target"]).mean(),
    model=encoder,
)
add(
    "transformer with a padding mask",
    lambda m, b: F.cross_entropy(
        m(b["x"], src_key_padding_mask=~b["mask"])[..., :NUM_CLASSES].flatten(0, 1), b["labels"].flatten()
    ),
    mean_over_words,
    model=lambda: encoder(batch_first=True),
)


@TABLE.loss("CTC", model=lambda: Net(NUM_CLASSES + 1))
def ctc(m, b):
    targets = b["labels"].clamp(min=0)[:, :2] + 1
    number = len(targets)
    logits = m(b["x"]).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(logits, targets, torch.full((number,), LENGTH), torch.full((number,), 2), zero_infinity=True)


# Ways to run a model


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(WIDTH, WIDTH), Net(), reentrant
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh())

    def forward(self, x):
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=self.reentrant))


add("checkpointing", classify, model=lambda: Checkpointed(reentrant=False))
add("checkpointing, reentrant", classify, model=lambda: Checkpointed(reentrant=True))
add("torch.compile", classify, model=lambda: torch.compile(Net(), backend="eager"))
add(
    "bf16 weights",
    lambda m, b: F.cross_entropy(pooled(m, b).float(), b["y"]),
    model=lambda: Net().bfloat16(),
    dtypes=("bfloat16",),
)
bf16 = {"autocast": lambda: torch.autocast("cpu", torch.bfloat16), "dtypes": ("float32",)}
add("bf16 autocast", classify, **bf16)
add("bf16 autocast, tokens", tag, mean_over_words, **bf16)


class Adapted(nn.Module):
    """Low-rank adapters of a frozen network."""

    def __init__(self, scale=0.0):
        super().__init__()
        self.base = Net(dropout=0.1).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, NUM_CLASSES, bias=False)
        nn.init.normal_(self.up.weight, std=scale) if scale else nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(F.dropout(self.down(x), 0.1, self.training))


add("adapters at the start", classify, model=Adapted)
add("adapters", classify, model=lambda: Adapted(0.1))


class Tied(nn.Module):
    def __init__(self, *, sparse=False):
        super().__init__()
        self.embed, self.out = (
            nn.Embedding(NUM_CLASSES + 1, 8, sparse=sparse),
            nn.Linear(8, NUM_CLASSES + 1, bias=False),
        )
        if not sparse:
            self.out.weight = self.embed.weight

    def forward(self, ids):
        return self.out(F.dropout(self.embed(ids), 0.2, self.training).cumsum(1))


def ids(b):
    return b["labels"].clamp(min=0) + 1


def predict(m, b):
    return F.cross_entropy(m(ids(b)).flatten(0, 1), b["labels"].flatten())


add("tied weights", predict, mean_over_words, model=Tied)
add("sparse embedding", predict, mean_over_words, model=lambda: Tied(sparse=True))
add(
    "bag of embeddings",
    lambda m, b: F.cross_entropy(m(ids(b)), b["y"]),
    model=lambda: nn.EmbeddingBag(NUM_CLASSES + 1, NUM_CLASSES, mode="mean"),
)


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = Net(), Net().requires_grad_(requires_grad=False)


@TABLE.loss("distillation from a frozen teacher", model=Distilled)
def distilled(m, b):
    with torch.no_grad():
        target = m.teacher(b["x"]).mean(1)
    return F.kl_div(m.student(b["x"]).mean(1).log_softmax(-1), target.softmax(-1), reduction="batchmean")


# Layers that draw random numbers, or branch on their inputs


class DropPath(nn.Module):
    def forward(self, x):
        kept = torch.bernoulli(torch.full((len(x), *[1] * (x.dim() - 1)), 0.7))
        return x * kept / 0.7 if self.training else x


class Noise(nn.Module):
    def forward(self, x):
        return x + 0.3 * torch.randn_like(x)


class Gumbel(nn.Module):
    def forward(self, x):
        return F.gumbel_softmax(x, hard=True)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.stack([(self.one if row.mean() > 0 else self.other)(row) for row in x])


class NoiseInLoop(nn.Module):
    def forward(self, x):
        return torch.stack([row * (1 + 0.1 * torch.randn(8)) for row in x])


class RandomLeak(nn.Module):
    def forward(self, x):
        return F.rrelu(x, training=self.training)


class EarlyExit(nn.Module):
    def __init__(self):
        super().__init__()
        self.step = nn.Linear(8, 8)

    def forward(self, x):
        active = torch.ones(len(x), dtype=torch.bool)
        for _ in range(3):
            if not active.any():
                break
            x = torch.where(active[:, None, None], torch.tanh(self.step(x)), x)
            active = active & (x.abs().amax((1, 2)) < 0.9)
        return x


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x):
        return self.inner(x)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        flat = x.flatten(0, -2)
        shares, y = self.gate(flat).softmax(-1), torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (shares.argmax(-1) == number).nonzero()[:, 0]
            y = y.index_add(0, rows, expert(flat[rows]) * shares[rows, number : number + 1])
        return y.view_as(x)


MIDDLES = {
    kind.__name__: kind
    for kind in (DropPath, Noise, Gumbel, Branching, NoiseInLoop, RandomLeak, EarlyExit, Spectral, Experts)
}
MIDDLES |= {
    "AlphaDropout": lambda: nn.AlphaDropout(0.2),
    "FeatureAlphaDropout": lambda: nn.FeatureAlphaDropout(0.2),
    "Dropout2d": lambda: nn.Dropout2d(0.2),
}
for name, kind in MIDDLES.items():
    add(f"inside the model: {name}", classify, model=lambda kind=kind: Net(middle=kind()))


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 4), nn.Linear(2, WIDTH)

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, -1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum(-1).mean()
        return self.decode(mean + (log_variance / 2).exp() * torch.randn_like(log_variance)), divergence


add("autoencoder", lambda m, b: (lambda out, kl: F.mse_loss(out, b["x"]) + 0.1 * kl)(*m(b["x"])), model=Variational)


@TABLE.loss("diffusion")
def diffusion(m, b):
    time, noise = torch.rand(len(b["x"]), 1, 1, dtype=b["x"].dtype), torch.randn_like(b["x"])
    return (m(b["x"] * (1 - time) + time * noise) - noise[..., :NUM_CLASSES]).square().mean()


@TABLE.loss("masking in the loss", declare=mean_over_words, model=Tied)
def masked_words(m, b):
    masked = torch.rand(b["labels"].shape) < 0.3
    return F.cross_entropy(m(ids(b).masked_fill(masked, 0)).flatten(0, 1), b["labels"].flatten())
