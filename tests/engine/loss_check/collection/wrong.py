# mypy: ignore-errors
"""Wrong setups: gradients of pieces, weighted as declared, do not add up to the gradient of the batch."""

import copy

import numpy as np
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
    focal_sum,
    mean_over_words,
    pooled,
    positives,
    score,
    tag,
    two_views,
)

TABLE = Table()
add = TABLE.add

# The wrong divisor
add("sum as mean", lambda m, b: classify(m, b, reduction="sum"))
add("mean as sum", classify, ab.sum_over_samples)
add("sum over a constant", lambda m, b: classify(m, b, reduction="sum") / 64)
add("sum over n plus a constant", lambda m, b: classify(m, b, reduction="sum") / (len(b["y"]) + 3))
add("tokens as samples", tag)
add(
    "mean of means as tokens",
    lambda m, b: (
        F.cross_entropy(m(b["x"]).transpose(1, 2), b["labels"], reduction="none").sum(1) / b["mask"].sum(1)
    ).mean(),
    mean_over_words,
)
add(
    "shift forgotten",
    lambda m, b: F.cross_entropy(m(b["x"])[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten()),
    mean_over_words,
)
add("shift that is not needed", tag, ab.mean_over_tokens)
add("class weights forgotten", lambda m, b: classify(m, b, weight=class_weights(b)))
add("class weights forgotten over tokens", lambda m, b: tag(m, b, weight=class_weights(b)), mean_over_words)
add("class weights and label smoothing", lambda m, b: classify(m, b, weight=class_weights(b), label_smoothing=0.1))
add("label smoothing and ignored labels", lambda m, b: tag(m, b, label_smoothing=0.1))
add("mask forgotten", lambda m, b: (m(b["x"]).square().mean(-1) * b["mask"]).sum() / b["mask"].sum())
add(
    "normalised sample weights", lambda m, b: (b["weight"] * (score(m, b) - b["target"]) ** 2).sum() / b["weight"].sum()
)
add(
    "mean over samples as mean over weights",
    lambda m, b: (b["weight"] * (score(m, b) - b["target"]) ** 2).mean(),
    lambda f: ab.mean_over(f, lambda b: b["weight"].sum()),
)
add(
    "positive weights, divided by them",
    lambda m, b: (
        F.binary_cross_entropy_with_logits(pooled(m, b), b["multi"], pos_weight=class_weights(b), reduction="sum")
        / (1 + (class_weights(b) - 1) * b["multi"]).sum()
    ),
)
add("focal loss over positives as samples", lambda m, b: focal_sum(m, b) / positives(b).clamp(min=1))
add(
    "focal loss over clamped positives",
    lambda m, b: focal_sum(m, b) / positives(b).clamp(min=1),
    lambda f: ab.mean_over(f, positives),
)
add("LossSum of a mean", lambda m, b: ab.LossSum(classify(m, b), len(b["y"])), lambda f: f)
add("LossSum that counts 1", lambda m, b: ab.LossSum(classify(m, b, reduction="sum"), 1), lambda f: f)
add("two divisors in one number", lambda m, b: classify(m, b) + tag(m, b))
add("penalty times n", lambda m, b: classify(m, b) + 0.01 * len(b["y"]) * sum(q.square().sum() for q in m.parameters()))
add(
    "divergence with reduction sum",
    lambda m, b: F.kl_div(pooled(m, b).log_softmax(-1), b["multi"].softmax(-1), reduction="sum"),
)
add(
    "CTC summed",
    lambda m, b: F.ctc_loss(
        m(b["x"]).log_softmax(-1).transpose(0, 1),
        torch.ones(len(b["y"]), 1, dtype=torch.long),
        torch.full((len(b["y"]),), LENGTH),
        torch.ones(len(b["y"]), dtype=torch.long),
        reduction="sum",
    ),
    model=lambda: Net(NUM_CLASSES + 1),
)
add(
    "a token term over samples",
    lambda m, b: {"lm": tag(m, b), "aux": (score(m, b) - b["target"]).square().mean()},
    lambda f: ab.sum_of(f, lm=ab.samples(), aux=ab.samples(weight=0.01)),
)
add(
    "copied declaration with other weights",
    lambda m, b: classify(m, b, weight=class_weights(b)),
    lambda f: copy.deepcopy(ab.mean_over(f, lambda b: CLASS_WEIGHTS.flip(0)[b["y"]].sum())),
)
add("root of a mean", lambda m, b: F.mse_loss(score(m, b), b["target"]).sqrt())
add("divided by its own value", lambda m, b: (lambda v: v / v.detach())(classify(m, b)))
add("flooding", lambda m, b: (classify(m, b) - 1.41).abs() + 1.41)

# Samples that interact in the loss
add("InfoNCE", lambda m, b: contrast(*two_views(m, b)))
add("InfoNCE, undeclared", lambda m, b: contrast(*two_views(m, b)), lambda f: f)
add("SimCSE by dropout", lambda m, b: contrast(F.normalize(pooled(m, b), dim=-1), F.normalize(pooled(m, b), dim=-1)))


@TABLE.loss("SupCon")
def supervised_contrast(m, b):
    z = F.normalize(pooled(m, b), dim=-1)
    own = torch.eye(len(z), dtype=torch.bool)
    similar = (z @ z.T / 0.2).masked_fill(own, -1e9)
    same = (b["y"][:, None] == b["y"]) & ~own
    return -((similar.log_softmax(1) * same).sum(1) / same.sum(1).clamp(min=1)).mean()


@TABLE.loss("triplets, hardest of the batch")
def triplets(m, b):
    d = torch.cdist(pooled(m, b), pooled(m, b).detach() + 1e-3)
    same = b["y"][:, None] == b["y"]
    return F.relu((d * same).amax(1) - d.masked_fill(same, 1e9).amin(1).clamp(max=10) + 0.5).mean()


@TABLE.loss("Barlow Twins")
def barlow_twins(m, b):
    one, other = ((z - z.mean(0)) / (z.std(0) + 1e-5) for z in (pooled(m, b), m(b["x"] + 0.1).mean(1)))
    return (one.T @ other / len(one) - torch.eye(NUM_CLASSES, dtype=one.dtype)).square().sum()


@TABLE.loss("VICReg")
def vicreg(m, b):
    one, other = pooled(m, b), m(b["x"] + 0.1).mean(1)
    covariance = torch.cov(one.T).fill_diagonal_(0)
    spread = F.relu(1 - (one.var(0) + 1e-4).sqrt()).mean()
    return F.mse_loss(one, other) + spread + covariance.square().sum() / NUM_CLASSES


@TABLE.loss("hardest half")
def hardest_half(m, b):
    each = classify(m, b, reduction="none")
    return each.topk(max(1, len(each) // 2)).values.mean()


@TABLE.loss("Dice over the batch")
def dice(m, b):
    q = pooled(m, b).sigmoid()
    return 1 - (2 * (q * b["multi"]).sum() + 1) / (q.sum() + b["multi"].sum() + 1)


@TABLE.loss("SwAV")
def swav(m, b):
    scores = pooled(m, b)
    with torch.no_grad():
        q = (m(b["x"] + 0.1).mean(1) / 0.3).exp()
        for _ in range(3):
            q = q / q.sum(0)
            q = q / q.sum(1, keepdim=True)
    return -(q * scores.log_softmax(-1)).sum(-1).mean()


@TABLE.loss("DINO, centred by the batch")
def dino(m, b):
    student, teacher = pooled(m, b), m(b["x"] + 0.1).mean(1).detach()
    return (-((teacher - teacher.mean(0)) / 0.1).softmax(-1) * student.log_softmax(-1)).sum(-1).mean()


@TABLE.loss("MMD between labels")
def mmd(m, b):
    z, y = pooled(m, b), b["y"]
    return (z[y < 2].mean(0) - z[y >= 2].mean(0)).nan_to_num().square().sum() + 0.01 * z.square().mean()


add(
    "divided by the largest loss",
    lambda m, b: (lambda e: (e / e.detach().max()).mean())(classify(m, b, reduction="none")),
)
add(
    "softmax of losses as weights",
    lambda m, b: (lambda e: (e.detach().softmax(0) * e).sum())(classify(m, b, reduction="none")),
)
add(
    "class weights of the batch",
    lambda m, b: (
        classify(
            m,
            b,
            weight=len(b["y"]) / (1 + torch.bincount(b["y"], minlength=NUM_CLASSES)).to(b["x"].dtype),
            reduction="sum",
        )
        / len(b["y"])
    ),
)
add("feature matching", lambda m, b: (m(b["x"]).mean((0, 1)) - b["multi"].mean(0)).square().sum())
add(
    "whitened advantages",
    lambda m, b: (
        -((b["target"] - b["target"].mean()) / (b["target"].std() + 1e-6) * pooled(m, b).log_softmax(-1)[:, 0]).mean()
    ),
)
add("correlation", lambda m, b: 1 - torch.corrcoef(torch.stack([score(m, b), b["target"]]))[0, 1])
add("entropy of the mean", lambda m, b: (lambda q: (q * q.log()).sum())(pooled(m, b).softmax(-1).mean(0)))
add("column minus row", lambda m, b: (pooled(m, b) - b["target"]).square().mean(), model=lambda: Net(1))
add(
    "decorrelation",
    lambda m, b: (torch.cov(pooled(m, b).T, correction=0) - torch.eye(NUM_CLASSES, dtype=b["x"].dtype)).square().sum(),
)
add(
    "first half against second half",
    lambda m, b: (lambda s, n: -F.logsigmoid(s[:n] - s[n : 2 * n]).mean())(score(m, b), len(b["y"]) // 2),
)
add("list-wise ranking", lambda m, b: -(b["target"].softmax(0) * score(m, b).log_softmax(0)).sum())


@TABLE.loss("weights by rank of length")
def by_rank(m, b):
    order = b["lengths"].argsort(stable=True)
    each = F.cross_entropy(pooled(m, b)[order], b["y"][order], reduction="none")
    return (each * torch.linspace(0, 1, len(order), dtype=each.dtype)).mean()


# Samples that interact in the model


class Routed(nn.Module):
    """Experts; the balance of their use is kept in an attribute or a list, or returned."""

    def __init__(self, keeps="attribute"):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(nn.Linear(WIDTH, NUM_CLASSES) for _ in range(4))
        self.keeps, self.kept = keeps, []

    def forward(self, x):
        shares = self.gate(x).softmax(-1)
        taken = F.one_hot(shares.argmax(-1), 4).to(x.dtype)
        balance = 4 * (taken.flatten(0, 1).mean(0) * shares.flatten(0, 1).mean(0)).sum()
        y = ((shares * taken)[..., None] * torch.stack([one(x) for one in self.experts], -2)).sum(-2)
        if self.keeps == "returned":
            return y, balance
        self.balance = balance
        self.kept[:] = [balance]
        return y


def returned(m, b):
    outputs, balance = m(b["x"])
    return F.cross_entropy(outputs.mean(1), b["y"]), balance


add("expert balance in an attribute", lambda m, b: classify(m, b) + 0.1 * m.balance, model=Routed)
add("small expert balance in an attribute", lambda m, b: classify(m, b) + 0.001 * m.balance, model=Routed)
add("expert balance in a list", lambda m, b: classify(m, b) + 0.1 * sum(m.kept), model=lambda: Routed("list"))
add(
    "expert balance returned",
    lambda m, b: (lambda one, other: one + 0.1 * other)(*returned(m, b)),
    model=lambda: Routed("returned"),
)
add(
    "expert balance as a term of samples",
    lambda m, b: dict(zip(("ce", "balance"), returned(m, b), strict=True)),
    lambda f: ab.sum_of(f, ce=ab.samples(), balance=ab.samples(weight=0.01)),
    model=lambda: Routed("returned"),
)


class Capacity(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        flat = x.flatten(0, -2)
        shares = self.gate(flat).softmax(-1)
        best, capacity, y = shares.argmax(-1), -(-len(flat) // 4), torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (best == number).nonzero()[:capacity, 0]
            y = y.index_add(0, rows, torch.tanh(expert(flat[rows])) * shares[rows, number : number + 1])
        return y.view_as(x)


class OwnNorm(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()


class Quantised(nn.Module):
    def forward(self, x):
        step = x.detach().abs().max() / 7
        return x + ((x / step).round().clamp(-7, 7) * step - x).detach()


class NormalisedSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        return slope / (slope.norm() + 1e-12)


class NormalisedGradient(nn.Module):
    def forward(self, x):
        return NormalisedSlope.apply(x)


class Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, extra):
        ctx.extra = extra.detach()
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        return slope, torch.ones_like(ctx.extra)


class BalancedInBackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)

    def forward(self, x):
        return Attached.apply(x, 0.4 * self.gate(x).softmax(-1).flatten(0, -2).mean(0).square().sum())


class SpreadOfBatch(nn.Module):
    def forward(self, x):
        return x + x.std(0, unbiased=False).mean()


class AttentionOverBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=False)

    def forward(self, x):
        return x + self.attention(x, x, x)[0]


class ScaledByBatch(nn.Module):
    def forward(self, x):
        return x / x.detach().abs().max()


class SoftmaxOverBatch(nn.Module):
    def forward(self, x):
        return x * x.softmax(0)


for kind in (
    Capacity,
    OwnNorm,
    Quantised,
    NormalisedGradient,
    BalancedInBackward,
    SpreadOfBatch,
    AttentionOverBatch,
    ScaledByBatch,
    SoftmaxOverBatch,
):
    add(f"inside the model: {kind.__name__}", classify, model=lambda kind=kind: Net(middle=kind()))


class ScaleInBuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        out = super().forward(x)
        self.scale.mul_(0.9).add_(0.1 * out.detach().abs().mean())
        return out / self.scale


add("running scale in a buffer", classify, model=ScaleInBuffer)


class Queue(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.randn(16, NUM_CLASSES))


@TABLE.loss("queue that is updated before its use", model=Queue)
def queued(m, b):
    one, other = two_views(m, b)
    m.queue = torch.cat([other.detach(), m.queue])[:16]
    logits = torch.cat([(one * other.detach()).sum(1, keepdim=True), one @ m.queue.T], 1)
    return F.cross_entropy(logits / 0.2, torch.zeros(len(one), dtype=torch.long))


class KeepsLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Net()

    def forward(self, b):
        self.loss = classify(self.inner, b, weight=class_weights(b))
        return self.loss


@TABLE.loss("loss in an attribute", model=KeepsLoss)
def kept(m, b):
    m(b)
    return m.loss


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 4), nn.Linear(2, WIDTH)

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, -1)
        self.divergence = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum(-1).mean()
        return self.decode(mean + (log_variance / 2).exp() * torch.randn_like(log_variance))


@TABLE.loss(
    "autoencoder with a masked term over samples",
    model=Variational,
    declare=lambda f: ab.sum_of(f, rec=ab.samples(), kl=ab.samples(weight=0.1)),
)
def autoencoder(m, b):
    out = m(b["x"])
    return {"rec": ((out - b["x"]).square().mean(-1) * b["mask"]).sum() / b["mask"].sum(), "kl": m.divergence}


# Samples that are combined before the model
add(
    "inputs standardised over the batch",
    lambda m, b: F.cross_entropy(m((b["x"] - b["x"].mean(0)) / (b["x"].std(0) + 1e-5)).mean(1), b["y"]),
)
add("inputs divided by the batch maximum", lambda m, b: F.cross_entropy(m(b["x"] / b["x"].abs().max()).mean(1), b["y"]))


def mixed(m, b, other, share=0.6):
    out = m(share * b["x"] + (1 - share) * b["x"][other]).mean(1)
    return share * F.cross_entropy(out, b["y"]) + (1 - share) * F.cross_entropy(out, b["y"][other])


add("mixup by torch.randperm", lambda m, b: mixed(m, b, torch.randperm(len(b["x"]))))
add("mixup by flip", lambda m, b: mixed(m, b, torch.arange(len(b["x"])).flip(0)))
add("mixup by numpy", lambda m, b: mixed(m, b, torch.from_numpy(np.random.permutation(len(b["x"])))))


@TABLE.loss("cutmix by roll")
def cutmix(m, b):
    x = b["x"].clone()
    x[:, :3] = b["x"].roll(1, 0)[:, :3]
    out = m(x).mean(1)
    return 0.6 * F.cross_entropy(out, b["y"]) + 0.4 * F.cross_entropy(out, b["y"].roll(1, 0))


@TABLE.loss("nearest neighbour in the batch")
def nearest(m, b):
    x = b["x"].flatten(1)
    other = b["x"][(torch.cdist(x, x) + 1e9 * torch.eye(len(x))).argmin(1)]
    return (pooled(m, b) - m(other).mean(1)).square().mean() + 0.1 * classify(m, b)


@TABLE.loss("cut to the longest, mean over padding")
def cut_to_longest(m, b):
    longest = int(b["lengths"].max())
    return F.cross_entropy((m(b["x"][:, :longest]) * b["mask"][:, :longest, None]).mean(1), b["y"])


# State, and ab.joint


class Margin:
    """Keeps a running margin in a Python number."""

    def __init__(self):
        self.margin = 0.0

    def __call__(self, m, b):
        gap = pooled(m, b)[:, 0] - pooled(m, b)[:, 1]
        self.margin = 0.9 * self.margin + 0.1 * gap.mean().item()
        return F.softplus(-(1 + 0.6 * self.margin) * gap).mean()


add("running margin in a number of Python", Margin)


def centred(m, b):
    z = pooled(m, b)
    return {"z": z - z.mean(0), "y": b["y"]}


add("joint: encode centres the batch", lambda _, o: contrast(o["z"], o["z"], 1.0), lambda f: ab.joint(centred, f))
