# mypy: ignore-errors
"""Right setups: the check must not call them broken."""

import torch
from torch.nn import functional as F

import anybatch as ab
from tests.engine.loss_check.collection.setups import (
    CLASS_WEIGHTS,
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
