# mypy: ignore-errors
# ruff: noqa: ANN, D101, D102, D103, E501
"""Right setups: the check must not call them broken."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anybatch as ab
from tests.engine.loss_check.collection.common import (
    CLASS_WEIGHTS,
    LENGTH,
    NUM_CLASSES,
    NUM_SAMPLES,
    WIDTH,
    Net,
    Table,
    class_weights,
    classify,
    focal_sum,
    mean_over_words,
    pooled,
    positives,
    score,
    tag,
    two_views,
    vectors,
)

TABLE = Table()
add = TABLE.add

# Losses
add("cross entropy", classify)
add("cross entropy, undeclared", classify, lambda f: f)
add("one loss per sample", lambda m, b: classify(m, b, reduction="none"))
add("sum as sum", lambda m, b: classify(m, b, reduction="sum"), ab.sum_over_samples)
add("label smoothing", lambda m, b: classify(m, b, label_smoothing=0.1))
add("tokens", tag, mean_over_words)
add(
    "one loss per token",
    lambda m, b: F.cross_entropy(m(b["x"]).transpose(1, 2), b["labels"], reduction="none"),
    mean_over_words,
)
add(
    "class weights",
    lambda m, b: classify(m, b, weight=class_weights(b)),
    lambda f: ab.mean_over(f, lambda b: CLASS_WEIGHTS[b["y"]].sum()),
)


def token_weights(b):
    return b["mask"] * b["weight"][:, None]


add(
    "token weights",
    lambda m, b: (m(b["x"]).square().mean(-1) * token_weights(b)).sum() / token_weights(b).sum(),
    lambda f: ab.mean_over(f, lambda b: token_weights(b).sum()),
)
add("LossSum, undeclared", lambda m, b: ab.LossSum(focal_sum(m, b), positives(b)), lambda f: f)
add("LossSum, counted", lambda m, b: ab.LossSum(focal_sum(m, b), positives(b)), lambda f: ab.mean_over(f, positives))
add(
    "LossSum of samples, undeclared", lambda m, b: ab.LossSum(classify(m, b, reduction="sum"), len(b["y"])), lambda f: f
)
add("squared error", lambda m, b: F.mse_loss(score(m, b), b["target"]), model=lambda: Net(1))
add(
    "binary cross entropy with positive weights",
    lambda m, b: F.binary_cross_entropy_with_logits(pooled(m, b), b["multi"], pos_weight=class_weights(b)),
)


def dice_of_samples(m, b, smooth, factor):
    q = pooled(m, b).sigmoid()
    return (1 - (2 * (q * b["multi"]).sum(1) + smooth) / (q.sum(1) * factor + b["multi"].sum(1) + smooth)).mean()


add("Dice of each sample", lambda m, b: dice_of_samples(m, b, 1.0, 1.0))
add("Dice with a small denominator", lambda m, b: dice_of_samples(m, b, 1e-6, 1e-3))
add(
    "logarithm of small probabilities",
    lambda m, b: -(pooled(m, b) * 20).softmax(-1)[:, 0].clamp(min=1e-12).log().mean(),
)
add("penalty on weights", lambda m, b: classify(m, b) + 0.01 * sum(q.square().sum() for q in m.parameters()))
add("constant added", lambda m, b: classify(m, b) + 3.0)
add(
    "two terms",
    lambda m, b: {"lm": tag(m, b), "aux": (score(m, b) - b["target"]).square().mean()},
    lambda f: ab.sum_of(f, lm=ab.tokens(shift=False), aux=ab.samples(weight=0.01)),
)
add(
    "a term that some samples lack",
    lambda m, b: {"a": classify(m, b), "b": F.mse_loss(score(m, b)[b["y"] == 0], b["target"][b["y"] == 0])},
    lambda f: ab.sum_of(f, a=ab.samples(), b=ab.counted(positives, weight=0.3)),
)
add(
    "three heads",
    lambda m, b: {
        "a": classify(m, b),
        "t": tag(m, b),
        "r": (b["weight"] * score(m, b).square()).sum() / b["weight"].sum(),
    },
    lambda f: ab.sum_of(
        f, a=ab.samples(), t=ab.tokens(shift=False), r=ab.counted(lambda b: b["weight"].sum(), weight=2.0)
    ),
)


def partly_masked():
    batch = vectors()
    batch["labels"][3:9] = -100
    return batch


add("samples without any target", tag, mean_over_words, batch=partly_masked)
add("weight zero for some samples", lambda m, b: ((b["target"] > 0) * classify(m, b, reduction="none")).mean())
add("hinge loss, mostly without a gradient", lambda m, b: F.relu(score(m, b) - 0.3 + 0.3 * b["target"]).mean())
add(
    "contrastive, joint",
    lambda _, o: F.cross_entropy(o["a"] @ o["b"].T / 0.2, torch.arange(len(o["a"]))),
    lambda f: ab.joint(lambda m, b: dict(zip("ab", two_views(m, b), strict=True)), f),
)


def simclr(_, outputs):
    z = F.normalize(outputs.transpose(0, 1).flatten(0, 1), dim=-1)
    similar = (z @ z.T / 0.2).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(similar, torch.arange(len(z)).roll(len(z) // 2))


def noisy_views(m, b):
    return torch.stack([pooled(m, b), m(b["x"] + 0.1 * torch.randn_like(b["x"])).mean(1)], 1)


add("two views of SimCLR, joint", simclr, lambda f: ab.joint(noisy_views, f))
add("policy gradient with given advantages", lambda m, b: -(b["target"] * pooled(m, b).log_softmax(-1)[:, 0]).mean())

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


# Layers that draw random numbers, or decide by their inputs


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
    """Graphs with all nodes in one row: they can be cut, and not put into another order."""

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
