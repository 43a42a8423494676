# mypy: ignore-errors
"""More wrong setups, as users write them."""

import pickle

import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from tests.engine.loss_check.collection.setups import (
    NUM_CLASSES,
    Net,
    Table,
    classify,
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


# Counts
add("count: len of a dict", classify, lambda f: ab.mean_over(f, len))
add(
    "count: at least one",
    lambda m, b: (each(m, b) * (b["y"] == 0)).sum() / positives(b).clamp(min=1),
    lambda f: ab.mean_over(f, lambda b: positives(b).clamp(min=1)),
)
add("count: a constant batch size", classify, lambda f: ab.mean_over(f, lambda _: 32))
add("count: the longest sequence", tag, lambda f: ab.mean_over(f, lambda b: b["lengths"].max()))
add("count: all positions, padding too", tag, lambda f: ab.mean_over(f, lambda b: b["labels"].numel()))
add("count: a mean of lengths", tag, lambda f: ab.mean_over(f, lambda b: b["lengths"].float().mean()))
add("count: classes that occur", classify, lambda f: ab.mean_over(f, lambda b: b["y"].unique().numel()))
add(
    "ignore_index of other labels",
    lambda m, b: F.cross_entropy(m(b["x"]).flatten(0, 1), b["labels"].clamp(min=0).flatten(), ignore_index=0),
    mean_over_words,
)
add("perplexity", lambda m, b: tag(m, b).exp(), mean_over_words)
add(
    "sum over time, mean over samples, as tokens",
    lambda m, b: F.cross_entropy(m(b["x"]).transpose(1, 2), b["labels"], reduction="none").sum(1).mean(),
    mean_over_words,
)
add("divided by the accumulation steps and summed", lambda m, b: classify(m, b, reduction="sum") / 4)
add(
    "mean over non-zero losses",
    lambda m, b: (lambda e: e.sum() / (e > 0).sum().clamp(min=1))(F.relu(score(m, b) - b["target"])),
)
add("NaN-safe mean over positives", lambda m, b: torch.nan_to_num((each(m, b) * (b["y"] == 0)).sum() / positives(b)))
add(
    "unpickled declaration over the wrong counts",
    tag,
    lambda f: pickled(ab.mean_over_tokens(f, labels=shifted_labels, shift=False)),
)
add(
    "class balance: mean of means",
    lambda m, b: torch.stack([each(m, b)[b["y"] == k].mean().nan_to_num() for k in range(NUM_CLASSES)]).mean(),
)
add(
    "two heads with their own masks",
    lambda m, b: tag(m, b) + (each(m, b) * (b["target"] > 0)).sum() / (b["target"] > 0).sum().clamp(min=1),
    mean_over_words,
)


def shifted_labels(b):
    return b["labels"][:, 1:]


def pickled(loss):
    """Return a loss whose declaration was pickled and restored, but not its function, which may be a lambda."""
    kind = pickle.loads(pickle.dumps(loss.kind.terms["loss"].items))
    (term,) = loss.kind.terms.values()
    object.__setattr__(term, "items", kind)
    return loss


# Weights and thresholds of the batch
add("weights normalised to mean one", lambda m, b: (b["weight"] / b["weight"].mean() * each(m, b)).mean())
add("losses above the mean only", lambda m, b: (lambda e: (e * (e > e.detach().mean())).mean())(each(m, b)))
add("losses clipped at the median", lambda m, b: (lambda e: torch.minimum(e, e.detach().median()).mean())(each(m, b)))
add("standard deviation as a risk", lambda m, b: (lambda e: e.mean() + 0.5 * e.std(unbiased=False))(each(m, b)))
add("log-sum-exp of losses", lambda m, b: (lambda e: e.logsumexp(0) - torch.tensor(float(len(e))).log())(each(m, b)))
add("largest loss (CVaR)", lambda m, b: each(m, b).max())
add(
    "advantages ranked",
    lambda m, b: -(b["target"].argsort().argsort() / len(b["target"]) * pooled(m, b).log_softmax(-1)[:, 0]).mean(),
)
add(
    "baseline: mean return of the batch",
    lambda m, b: -((b["target"] - b["target"].mean()) * pooled(m, b).log_softmax(-1)[:, 0]).mean(),
)
add(
    "R squared",
    lambda m, b: (score(m, b) - b["target"]).square().sum() / (b["target"] - b["target"].mean()).square().sum(),
)
add(
    "uncertainty weights by the batch's loss",
    lambda m, b: (lambda one, two: one / one.detach() + two / two.detach())(
        classify(m, b), score(m, b).square().mean()
    ),
)
add(
    "soft F1",
    lambda m, b: (
        1 - (lambda q, t: 2 * (q * t).sum() / (q + t).sum())(score(m, b).sigmoid(), (b["y"] == 0).to(b["x"].dtype))
    ),
)
add(
    "AUC surrogate",
    lambda m, b: F.softplus(
        -(score(m, b)[:, None] - score(m, b)[None]) * torch.sign(b["target"][:, None] - b["target"][None])
    ).mean(),
)
add(
    "centre of each class in the batch",
    lambda m, b: (
        torch.stack(
            [(pooled(m, b)[b["y"] == k] - pooled(m, b)[b["y"] == k].mean(0)).square().sum() for k in range(NUM_CLASSES)]
        ).sum()
        / len(b["y"])
    ),
)
add(
    "labels smoothed towards the batch's frequencies",
    lambda m, b: (
        -(torch.bincount(b["y"], minlength=NUM_CLASSES).to(b["x"].dtype) / len(b["y"]) * pooled(m, b).log_softmax(-1))
        .sum(-1)
        .mean()
    ),
)
add(
    "CLIP with hard labels, symmetric",
    lambda m, b: (
        lambda a, c: (
            F.cross_entropy(5 * a @ c.T, torch.arange(len(a))) + F.cross_entropy(5 * c @ a.T, torch.arange(len(a)))
        )
    )(*two_views(m, b)),
)
add(
    "consistency with a permuted batch",
    lambda m, b: (pooled(m, b) - pooled(m, b)[torch.randperm(len(b["y"]))]).square().mean(),
)
add("manifold mixup", lambda m, b: manifold_mixup(m, b))


def manifold_mixup(m, b):
    hidden = m.body[0](b["x"])
    other = torch.arange(len(hidden)).roll(1)
    out = m.body[1:](0.7 * hidden + 0.3 * hidden[other]).mean(1)
    return 0.7 * F.cross_entropy(out, b["y"]) + 0.3 * F.cross_entropy(out, b["y"][other])


# Layers


class MinMax(nn.Module):
    def forward(self, x):
        low, high = x.amin(), x.amax()
        return (x - low) / (high - low + 1e-6)


class SharedPrompt(nn.Module):
    """Attends to the mean of the batch."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.mix(x.mean(0, keepdim=True))


class TopOfBatch(nn.Module):
    """Keeps the largest half of the activations of the batch."""

    def forward(self, x):
        limit = x.detach().flatten().median()
        return x * (x >= limit)


class SharedLength(nn.Module):
    """Divides by the square root of the number of rows."""

    def forward(self, x):
        return x / len(x) ** 0.5


class Codebook(nn.Module):
    """Vector quantisation whose perplexity regularises the batch."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Embedding(5, 8)

    def forward(self, x):
        flat = x.flatten(0, -2)
        soft = (-torch.cdist(flat, self.codes.weight)).softmax(-1)
        self.usage = (soft.mean(0) * soft.mean(0).log()).sum()
        return (soft @ self.codes.weight).view_as(x)


for kind in (MinMax, SharedPrompt, TopOfBatch, SharedLength):
    add(f"inside the model: {kind.__name__}", classify, model=lambda kind=kind: Net(middle=kind()))
add("usage of a codebook", lambda m, b: classify(m, b) + 0.1 * m.body[1].usage, model=lambda: Net(middle=Codebook()))


def sorted_batch():
    batch = vectors(40)
    order = batch["y"].argsort(stable=True)
    return {name: value[order] for name, value in batch.items()}


add(
    "class weights forgotten, sorted by class",
    lambda m, b: classify(m, b, weight=torch.tensor([1.0, 2.0, 3.0, 4.0]).to(b["x"].dtype)),
    batch=sorted_batch,
)
