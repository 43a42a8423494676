# mypy: ignore-errors
"""More right setups, as users write them."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from tests.engine.loss_check.collection.setups import (
    CLASS_WEIGHTS,
    LENGTH,
    NUM_CLASSES,
    WIDTH,
    Net,
    Table,
    class_weights,
    classify,
    contrast,
    each,
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


# Losses and counts
add(
    "accuracy next to the loss",
    lambda m, b: (lambda out: (out.argmax(1) == b["y"]).float().mean().item() * 0 + F.cross_entropy(out, b["y"]))(
        pooled(m, b)
    ),
)
add("Huber loss", lambda m, b: F.huber_loss(score(m, b), b["target"]))
add("Gaussian likelihood", lambda m, b: F.gaussian_nll_loss(pooled(m, b)[:, 0], b["target"], pooled(m, b)[:, 1].exp()))
add("Poisson likelihood", lambda m, b: F.poisson_nll_loss(score(m, b), b["y"].to(b["x"].dtype)))
add(
    "ordinal regression",
    lambda m, b: F.binary_cross_entropy_with_logits(
        pooled(m, b), (b["y"][:, None] > torch.arange(NUM_CLASSES)).to(b["x"].dtype)
    ),
)
add("triplet inside a sample", lambda m, b: F.triplet_margin_loss(m(b["x"])[:, 0], m(b["x"])[:, 1], m(b["x"])[:, 2]))
add(
    "cosine embedding", lambda m, b: F.cosine_embedding_loss(m(b["x"])[:, 0], m(b["x"])[:, 1], b["multi"][:, 0] * 2 - 1)
)
add("quantile loss", lambda m, b: (lambda d: torch.maximum(0.9 * d, -0.1 * d).mean())(b["target"] - score(m, b)))
add("weights times losses, plain mean", lambda m, b: (b["weight"] * each(m, b)).mean())
add(
    "sum of samples over their own lengths",
    lambda m, b: ((m(b["x"]).square().mean(-1) * b["mask"]).sum(1) / b["mask"].sum(1)).mean(),
)
add("sum over time, mean over samples", lambda m, b: (m(b["x"]).square().mean(-1) * b["mask"]).sum(1).mean())
add("losses clipped at a constant", lambda m, b: each(m, b).clamp(max=2.0).mean())
add("gradient-scaled loss", lambda m, b: 128.0 * classify(m, b))
add(
    "confidence penalty",
    lambda m, b: classify(m, b) - 0.1 * (lambda q: -(q * q.log()).sum(-1).mean())(pooled(m, b).softmax(-1)),
)
add(
    "tokens with z-loss as a second term",
    lambda m, b: zloss(m, b),
    lambda f: ab.sum_of(f, ce=ab.tokens(shift=False), z=ab.tokens(shift=False, weight=1e-3)),
)
add("tokens of a copied declaration", tag, lambda f: copy.deepcopy(mean_over_words(f)))
add(
    "class weights of a copied declaration",
    lambda m, b: classify(m, b, weight=class_weights(b)),
    lambda f: copy.deepcopy(ab.mean_over(f, lambda b: CLASS_WEIGHTS[b["y"]].sum())),
)
add(
    "LossSum of a copied declaration",
    lambda m, b: ab.LossSum((each(m, b) * (b["y"] == 0)).sum(), positives(b)),
    lambda f: copy.deepcopy(ab.mean_over(f, positives)),
)
add(
    "counts of a few samples only",
    lambda m, b: (each(m, b) * (b["y"] == 0)).sum() / positives(b),
    lambda f: ab.mean_over(f, positives),
)
add(
    "packed rows: all tokens count",
    lambda m, b: m(b["x"]).square().mean(),
    lambda f: ab.mean_over(f, lambda b: b["x"].shape[0] * b["x"].shape[1]),
)
add("labels by a function", tag, lambda f: ab.mean_over_tokens(f, labels=lambda b: b["labels"], shift=False))


def zloss(m, b):
    logits, known = m(b["x"]), b["labels"] != -100
    return {"ce": tag(m, b), "z": logits.logsumexp(-1).square()[known].mean()}


def all_words():
    batch = vectors()
    batch["labels"] = batch["labels"].clamp(min=0)
    return batch


add("tokens without any mask", tag, mean_over_words, batch=all_words)


def zero_gradient(m, b):
    with torch.no_grad():
        target = pooled(m, b)
    return (pooled(m, b) - target).square().mean() + 0.01 * score(m, b).square().mean()


add("teacher that equals the student, and a penalty", zero_gradient, model=lambda: Net(dropout=0.0))


def constant_for_some(m, b):
    chosen = b["target"] > 0
    if not chosen.any():
        return b["x"].new_zeros(())
    return each(m, b)[chosen].sum() / len(b["y"])


add("a constant where no sample counts", constant_for_some)
add(
    "LossSum without a graph where no sample counts",
    lambda m, b: ab.LossSum(each(m, b)[b["y"] == 0].sum() if positives(b) else torch.zeros(()), positives(b)),
    lambda f: ab.mean_over(f, positives),
)

# Models


class Cached(nn.Module):
    """Keeps a table of positions in an attribute, made in the first forward and in its dtype."""

    def __init__(self):
        super().__init__()
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[1], dtype=x.dtype, device=x.device)[:, None]
        return x + self.table


class Histogram(nn.Module):
    """Keeps statistics for a plot, which outputs do not use."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        with torch.no_grad():
            self.seen.mul_(0.9).add_(0.1 * x.flatten(0, -2).mean(0))
        return x


class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 8)

    def forward(self, x):
        return x * self.gate(x.mean(1, keepdim=True)).sigmoid()


class ByThreshold(nn.Module):
    def forward(self, x):
        return x * (x > x.detach().mean(dim=(1, 2), keepdim=True))


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


class Fused(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.3)[:, 0]


class Stochastic(nn.Module):
    """Skips itself for the whole batch at random."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.inner(x) if torch.rand(()) < 0.8 else x


class StraightThrough(nn.Module):
    def forward(self, x):
        hard = (x > 0).to(x.dtype)
        return hard + x - x.detach()


class BetaNoise(nn.Module):
    """Draws from a distribution whose parameters the model computes."""

    def forward(self, x):
        return x * torch.distributions.Gamma(x.exp() + 1.0, torch.ones_like(x)).rsample().clamp(max=4.0)


for kind in (
    Cached,
    Histogram,
    SqueezeExcite,
    ByThreshold,
    SelfAttention,
    Fused,
    Stochastic,
    StraightThrough,
    BetaNoise,
):
    add(f"inside the model: {kind.__name__}", classify, model=lambda kind=kind: Net(middle=kind()))


def residual():
    return nn.Sequential(
        nn.Flatten(),
        nn.utils.parametrizations.weight_norm(nn.Linear(LENGTH * WIDTH, 8)),
        nn.PReLU(),
        nn.Dropout(0.1),
        nn.Linear(8, NUM_CLASSES),
    )


add("weight norm", lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), model=residual)
add(
    "frozen trunk in evaluation mode",
    lambda m, b: F.cross_entropy(m[1](m[0].eval()(b["x"])).mean(1), b["y"]),
    model=lambda: nn.ModuleList([Net(8).requires_grad_(requires_grad=False), nn.Linear(8, NUM_CLASSES)]),
)


class Hooked(Net):
    """Has gradient hooks, which the engine runs once on the sums; the check skips them."""

    def __init__(self):
        super().__init__()
        self.body[0].register_forward_hook(lambda _module, _inputs, output: output * 1.5)


add("forward hook", classify, model=Hooked)


class Method(Net):
    def training_step(self, _model, b):
        return classify(self, b)


METHOD = Method()
add("loss that is a method", METHOD.training_step, model=lambda: METHOD, dtypes=("float32",))
add(
    "queue of earlier steps, joint",
    lambda m, o: queued(m, o),
    lambda f: ab.joint(lambda m, b: dict(zip(("query", "key"), two_views(m, b), strict=True)), f),
    model=lambda: WithQueue(),
)


class WithQueue(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.randn(16, NUM_CLASSES))


def queued(m, o):
    value = F.cross_entropy(o["query"] @ torch.cat([o["key"], m.queue]).T / 0.2, torch.arange(len(o["query"])))
    m.queue = torch.cat([o["key"].detach(), m.queue])[:16]
    return value


add(
    "temperature of the model in a joint loss",
    lambda m, o: contrast(o["query"], o["key"], m.temperature.exp()),
    lambda f: ab.joint(lambda m, b: dict(zip(("query", "key"), two_views(m, b), strict=True)), f),
    model=lambda: WithTemperature(),
)


class WithTemperature(Net):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.zeros(()))


def sorted_batch():
    batch = vectors(40)
    order = batch["y"].argsort(stable=True)
    return {name: value[order] for name, value in batch.items()}


add("sorted by class", classify, batch=sorted_batch)
add(
    "sorted by class, with weights",
    lambda m, b: classify(m, b, weight=class_weights(b)),
    lambda f: ab.mean_over(f, lambda b: CLASS_WEIGHTS[b["y"]].sum()),
    batch=sorted_batch,
)
