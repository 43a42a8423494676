"""Models for `plan_unseen.py` that no test and no page of the documentation names, by family.

Each entry is a module, a loss (the mean over samples) and a function (samples) -> batch. They are small, and written to
use what their family uses: gathers and scatters, neighbours, volumes, shared tables, gradients of gradients, sizes that
depend on data.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Any]
Entry = tuple[str, str, Callable[[], nn.Module], Callable[[nn.Module, Batch], Tensor], Callable[[int], Batch]]
ENTRIES: list[Entry] = []
"""Family, name, model, loss and batch of each model, in order."""


class Function(nn.Module):
    """A module of named layers, and a function of it and a batch."""

    def __init__(self, run: Callable[..., Tensor], layers: dict[str, Any]) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, nn.Parameter(layer) if isinstance(layer, Tensor) else layer)
        self.run = run

    def forward(self, *inputs: Any) -> Tensor:
        """Return the function's result."""
        return self.run(self, *inputs)


def add(
    family: str, layers: Callable[[], dict[str, Any]], batch: Callable[[int], Batch]
) -> Callable[[Callable[[Any, Batch], Tensor]], Callable[[Any, Batch], Tensor]]:
    """Register the decorated function (model, batch) -> one loss per sample, or their mean."""

    def register(loss: Callable[[Any, Batch], Tensor]) -> Callable[[Any, Batch], Tensor]:
        name = loss.__name__.strip("_").replace("_", " ")
        ENTRIES.append((family, name, lambda: Function(lambda m, b: loss(m, b).mean(), layers()), _run, batch))
        return loss

    return register


def _run(model: nn.Module, batch: Batch) -> Tensor:
    result: Tensor = model(batch)
    return result


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for first, second in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(first, second), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def classes(logits: Tensor, batch: Batch) -> Tensor:
    """Return the cross-entropy of each sample."""
    return F.cross_entropy(logits, batch["y"], reduction="none")


def y(n: int, number: int = 10) -> Tensor:
    """Return labels."""
    return torch.randint(number, (n,))


# fmt: off
# Graphs: 48 nodes with 8 neighbours each.
NODES, NEAR = 48, 8

def graphs(n: int) -> Batch:
    """Return graphs as neighbours and as an adjacency matrix."""
    near = torch.randint(NODES, (n, NODES, NEAR))
    adjacency = torch.zeros(n, NODES, NODES).scatter_(2, near, 1.0)
    return {"x": torch.randn(n, NODES, 16), "near": near, "a": adjacency, "y": y(n)}

def of_near(x: Tensor, near: Tensor) -> Tensor:
    """Return the features of neighbours (samples, nodes, neighbours, width)."""
    index = near.flatten(1).unsqueeze(-1).expand(-1, -1, x.shape[-1])
    return x.gather(1, index).unflatten(1, near.shape[1:])

@add("graph", lambda: {"a": nn.Linear(16, 128), "b": nn.Linear(128, 128), "c": nn.Linear(128, 10)}, graphs)
def graph_convolution(m: Any, b: Batch) -> Tensor:
    a = b["a"] / b["a"].sum(-1, keepdim=True).clamp(min=1)
    h = (a @ m.b((a @ m.a(b["x"])).relu())).relu()
    return classes(m.c(h.mean(1)), b)

@add("graph", lambda: {"v": nn.Linear(16, 128), "s": nn.Linear(128, 4), "t": nn.Linear(128, 4), "c": nn.Linear(128, 10)}, graphs)
def graph_attention(m: Any, b: Batch) -> Tensor:
    v = m.v(b["x"])
    score = F.leaky_relu(m.s(v).unsqueeze(2) + m.t(v).unsqueeze(1), 0.2)
    weight = score.masked_fill(b["a"].unsqueeze(-1) == 0, -1e9).softmax(2)
    h = torch.einsum("bijh,bjhd->bihd", weight, v.unflatten(-1, (4, 32))).flatten(2)
    return classes(m.c(F.elu(h).mean(1)), b)

@add("graph", lambda: {"p": mlp(16, 64), "q": mlp(80, 128), "c": nn.Linear(128, 10)}, graphs)
def sage_by_maximum(m: Any, b: Batch) -> Tensor:
    pooled = of_near(m.p(b["x"]), b["near"]).amax(2)
    return classes(m.c(m.q(torch.cat([b["x"], pooled], -1)).amax(1)), b)

@add("graph", lambda: {"e": nn.Linear(16, 96), "f": mlp(96, 192, 96), "eps": torch.zeros(1), "c": nn.Linear(96, 10)}, graphs)
def isomorphism_by_index_add(m: Any, b: Batch) -> Tensor:
    n, h = len(b["x"]), m.e(b["x"])
    start = torch.arange(n).view(n, 1, 1) * NODES
    target, source = (
        (b["near"] + start).flatten(),
        (torch.arange(NODES).view(1, NODES, 1) + start).expand(n, NODES, NEAR).flatten(),
    )
    flat = h.flatten(0, 1)
    h = m.f((1 + m.eps) * flat + torch.zeros_like(flat).index_add(0, target, flat[source]))
    return classes(m.c(h.unflatten(0, (n, NODES)).sum(1)), b)

@add("graph", lambda: {"e": mlp(32, 128, 64), "u": mlp(80, 64), "c": nn.Linear(64, 10)}, graphs)
def messages_by_scatter_mean(m: Any, b: Batch) -> Tensor:
    pairs = torch.cat([of_near(b["x"], b["near"]), b["x"].unsqueeze(2).expand(-1, -1, NEAR, -1)], -1)
    sent = m.e(pairs).flatten(1, 2)
    index = b["near"].flatten(1).unsqueeze(-1).expand_as(sent)
    got = torch.zeros(len(sent), NODES, 64, dtype=sent.dtype).scatter_reduce(1, index, sent, "mean", include_self=False)
    return classes(m.c(m.u(torch.cat([b["x"], got], -1)).mean(1)), b)

@add("graph", lambda: {"e": nn.Linear(16, 64), "u": mlp(256, 64), "c": nn.Linear(64, 10)}, graphs)
def principal_aggregation(m: Any, b: Batch) -> Tensor:
    near = of_near(m.e(b["x"]), b["near"])
    h = torch.cat([near.mean(2), near.amax(2), near.amin(2), near.std(2)], -1)
    return classes(m.c(m.u(h).mean(1)), b)

@add("graph", lambda: {"e": nn.Linear(16, 64), "w": nn.Linear(64, 64), "g": nn.GRUCell(64, 64), "c": nn.Linear(64, 10)}, graphs)
def gated_graph(m: Any, b: Batch) -> Tensor:
    h = m.e(b["x"])
    for _ in range(4):
        h = m.g((b["a"] @ m.w(h)).flatten(0, 1), h.flatten(0, 1)).unflatten(0, (-1, NODES))
    return classes(m.c(h.mean(1)), b)

@add("graph", lambda: {"f": mlp(16, 128, 64), "c": nn.Linear(64, 10)}, graphs)
def personalised_propagation(m: Any, b: Batch) -> Tensor:
    a = b["a"] / b["a"].sum(-1, keepdim=True).clamp(min=1)
    h = start = m.f(b["x"])
    for _ in range(10):
        h = 0.9 * (a @ h) + 0.1 * start
    return classes(m.c(h.mean(1)), b)

@add("graph", lambda: {"e": nn.Linear(16, 64), "s": nn.Linear(64, 12), "f": nn.Linear(64, 64), "c": nn.Linear(64, 10)}, graphs)
def differentiable_pooling(m: Any, b: Batch) -> Tensor:
    h = m.e(b["x"]).relu()
    s = m.s(h).softmax(-1)
    pooled, coarse = s.mT @ h, s.mT @ b["a"] @ s
    return classes(m.c((coarse @ m.f(pooled)).relu().mean(1)), b) + (b["a"] - s @ s.mT).square().mean((1, 2))

@add("graph", lambda: {"e": mlp(33, 64, 64), "x": mlp(64, 64, 1), "h": mlp(80, 64, 16)}, lambda n: {"h": torch.randn(n, 24, 16), "p": torch.randn(n, 24, 3), "t": torch.randn(n, 24, 3)})
def equivariant(m: Any, b: Batch) -> Tensor:
    h, p = b["h"], b["p"]
    for _ in range(3):
        d = p.unsqueeze(2) - p.unsqueeze(1)
        left, right = h.unsqueeze(2).expand(-1, -1, 24, -1), h.unsqueeze(1).expand(-1, 24, -1, -1)
        e = m.e(torch.cat([left, right, d.square().sum(-1, keepdim=True)], -1))
        p, h = p + (d * m.x(e)).mean(2), h + m.h(torch.cat([h, e.sum(2)], -1))
    return (p - b["t"]).square().mean((1, 2))

@add("graph", lambda: {"e": nn.Embedding(5000, 64), "w": nn.Bilinear(64, 64, 1)}, lambda n: {"e": torch.randint(5000, (n, 40, 3))})
def link_prediction(m: Any, b: Batch) -> Tensor:
    head, tail, wrong = (m.e(b["e"][..., i]) for i in range(3))
    return F.softplus(m.w(head, wrong) - m.w(head, tail)).mean((1, 2))

# Points: 128 in three dimensions.
def points(n: int) -> Batch:
    """Return clouds of points."""
    return {"p": torch.randn(n, 128, 3), "q": torch.randn(n, 128, 3), "y": y(n)}

def nearest(p: Tensor, k: int) -> Tensor:
    """Return the numbers of the k nearest points."""
    return torch.cdist(p, p).topk(k, largest=False).indices

@add("points", lambda: {"t": mlp(3, 64, 9), "f": mlp(3, 64, 128, 256), "c": mlp(256, 128, 10)}, points)
def points_with_transform(m: Any, b: Batch) -> Tensor:
    t = m.t(b["p"]).amax(1).unflatten(-1, (3, 3))
    return classes(m.c(m.f(b["p"] @ t).amax(1)), b)

@add("points", lambda: {"e": mlp(6, 64, 64), "f": mlp(128, 128), "c": nn.Linear(128, 10)}, points)
def dynamic_edges(m: Any, b: Batch) -> Tensor:
    h = b["p"]
    for layer in (m.e, m.f):
        near = of_near(h, nearest(h.detach(), 10))
        h = layer(torch.cat([near - h.unsqueeze(2), h.unsqueeze(2).expand_as(near)], -1)).amax(2)
    return classes(m.c(h.amax(1)), b)

@add("points", lambda: {"e": mlp(3, 64, 128), "f": mlp(131, 256), "c": nn.Linear(256, 10)}, points)
def farthest_samples(m: Any, b: Batch) -> Tensor:
    p, chosen = b["p"], [torch.zeros(len(b["p"]), 1, dtype=torch.int64)]
    distance = torch.full(p.shape[:2], 1e9)
    for _ in range(15):
        last = p.gather(1, chosen[-1].unsqueeze(-1).expand(-1, -1, 3))
        distance = torch.minimum(distance, (p - last).square().sum(-1))
        chosen.append(distance.argmax(1, keepdim=True))
    centres = p.gather(1, torch.cat(chosen, 1).unsqueeze(-1).expand(-1, -1, 3))
    near = of_near(p, torch.cdist(centres, p).topk(16, largest=False).indices)
    h = m.e(near - centres.unsqueeze(2)).amax(2)
    return classes(m.c(m.f(torch.cat([centres, h], -1)).amax(1)), b)

@add("points", lambda: {"e": nn.Linear(3, 48), "q": nn.Linear(48, 48), "k": nn.Linear(48, 48), "v": nn.Linear(48, 48), "d": mlp(3, 48, 48), "g": mlp(48, 48, 48), "c": nn.Linear(48, 10)}, points)
def vector_attention(m: Any, b: Batch) -> Tensor:
    h, near = m.e(b["p"]), nearest(b["p"], 12)
    d = m.d(b["p"].unsqueeze(2) - of_near(b["p"], near))
    weight = m.g(m.q(h).unsqueeze(2) - of_near(m.k(h), near) + d).softmax(2)
    return classes(m.c((weight * (of_near(m.v(h), near) + d)).sum(2).mean(1)), b)

@add("points", lambda: {"f": mlp(3, 128, 256), "g": mlp(256, 256, 384)}, points)
def chamfer_autoencoder(m: Any, b: Batch) -> Tensor:
    made = m.g(m.f(b["p"]).amax(1)).unflatten(-1, (128, 3))
    d = torch.cdist(made, b["p"])
    return d.amin(1).mean(1) + d.amin(2).mean(1)

@add("points", lambda: {"e": nn.Linear(3, 32), "k": torch.randn(13, 3), "w": torch.randn(13, 32, 64) / 8, "c": nn.Linear(64, 10)}, points)
def kernel_points(m: Any, b: Batch) -> Tensor:
    near = nearest(b["p"], 12)
    d = (of_near(b["p"], near) - b["p"].unsqueeze(2)).unsqueeze(3) - m.k
    weight = (1 - d.norm(dim=-1)).clamp(min=0)
    h = torch.einsum("bpnk,bpnc->bpkc", weight, of_near(m.e(b["p"]), near))
    return classes(m.c(torch.einsum("bpkc,kcd->bpd", h, m.w).relu().mean(1)), b)

@add("points", lambda: {"f": mlp(3, 128, 128, 128), "c": mlp(128, 64, 10)}, points)
def smooth_maximum(m: Any, b: Batch) -> Tensor:
    return classes(m.c(torch.logsumexp(m.f(b["p"]), 1)), b)

@add("points", lambda: {"e": nn.Linear(3, 16), "f": nn.Conv3d(16, 32, 3, padding=1), "c": nn.Linear(32, 10)}, points)
def points_to_voxels(m: Any, b: Batch) -> Tensor:
    n, h = len(b["p"]), m.e(b["p"])
    cell = ((b["p"].clamp(-2, 1.99) + 2) * 2).long()
    flat = (cell[..., 0] * 8 + cell[..., 1]) * 8 + cell[..., 2] + torch.arange(n).unsqueeze(1) * 512
    grid = torch.zeros(n * 512, 16, dtype=h.dtype).index_put((flat.flatten(),), h.flatten(0, 1), accumulate=True)
    h = m.f(grid.view(n, 8, 8, 8, 16).permute(0, 4, 1, 2, 3)).relu()
    return classes(m.c(h.mean((2, 3, 4))), b)

# Volumes: 24 voxels wide.
def volumes(n: int) -> Batch:
    """Return volumes with a mask and a label."""
    return {"x": torch.randn(n, 1, 24, 24, 24), "m": torch.randint(2, (n, 24, 24, 24)), "y": y(n)}

def block3(first: int, second: int, **options: Any) -> nn.Sequential:
    """Return a convolution of volumes with its norm."""
    return nn.Sequential(nn.Conv3d(first, second, 3, padding=1, **options), nn.GroupNorm(4, second), nn.ReLU())

@add("volumes", lambda: {"a": block3(1, 16), "b": block3(16, 32, stride=2), "u": nn.ConvTranspose3d(32, 16, 2, 2), "c": nn.Conv3d(32, 2, 1)}, volumes)
def u_shaped(m: Any, b: Batch) -> Tensor:
    a = m.a(b["x"])
    logits = m.c(torch.cat([a, m.u(m.b(a))], 1))
    return F.cross_entropy(logits, b["m"], reduction="none").mean((1, 2, 3))

@add("volumes", lambda: {"a": nn.Conv3d(1, 16, 5, padding=2), "p": nn.PReLU(16), "d": nn.Conv3d(16, 32, 2, 2), "u": nn.ConvTranspose3d(32, 16, 2, 2), "c": nn.Conv3d(16, 1, 1)}, volumes)
def residual_with_dice(m: Any, b: Batch) -> Tensor:
    h = m.p(m.a(b["x"]) + b["x"])
    p = m.c(h + m.u(m.d(h))).sigmoid().flatten(1)
    t = b["m"].flatten(1)
    return 1 - (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)

@add("volumes", lambda: {"a": block3(1, 32), "b": block3(32, 32), "d": block3(32, 64, stride=2), "c": nn.Linear(64, 10)}, volumes)
def residual_of_volumes(m: Any, b: Batch) -> Tensor:
    h = m.a(b["x"])
    return classes(m.c(m.d(h + m.b(h)).mean((2, 3, 4))), b)

@add("volumes", lambda: {"s": nn.Conv3d(3, 48, (1, 7, 7), (1, 2, 2), (0, 3, 3)), "n": nn.BatchNorm3d(48), "t": nn.Conv3d(48, 64, (3, 1, 1), padding=(1, 0, 0)), "c": nn.Linear(64, 10)}, lambda n: {"x": torch.randn(n, 3, 8, 56, 56), "y": y(n)})
def split_time_and_space(m: Any, b: Batch) -> Tensor:
    return classes(m.c(m.t(m.n(m.s(b["x"])).relu()).relu().mean((2, 3, 4))), b)

@add("volumes", lambda: {"e": nn.Conv3d(1, 64, 4, 4), "a": nn.MultiheadAttention(64, 4, batch_first=True), "f": mlp(64, 256, 64), "c": nn.Linear(64, 10)}, volumes)
def windows_of_volumes(m: Any, b: Batch) -> Tensor:
    h = m.e(b["x"]).unfold(2, 3, 3).unfold(3, 3, 3).unfold(4, 3, 3)
    h = h.permute(0, 2, 3, 4, 5, 6, 7, 1).reshape(-1, 27, 64)
    h = h + m.a(h, h, h, need_weights=False)[0]
    return classes(m.c((h + m.f(h)).mean(1).unflatten(0, (len(b["x"]), -1)).mean(1)), b)

@add("volumes", lambda: {"e": nn.Conv3d(1, 32, 4, 2, 1), "m": nn.Conv3d(32, 16, 4, 2, 1), "v": nn.Conv3d(32, 16, 4, 2, 1), "d": nn.ConvTranspose3d(16, 32, 4, 2, 1), "o": nn.ConvTranspose3d(32, 1, 4, 2, 1)}, volumes)
def variational_volumes(m: Any, b: Batch) -> Tensor:
    h = m.e(b["x"]).relu()
    mean, log = m.m(h), m.v(h)
    made = m.o(m.d(mean + torch.randn_like(mean) * (0.5 * log).exp()).relu())
    return (made - b["x"]).square().flatten(1).mean(1) - 0.5 * (1 + log - mean.square() - log.exp()).flatten(1).mean(1)

@add("volumes", lambda: {"a": nn.Conv3d(1, 32, 3, padding=1), "b": nn.Conv3d(32, 64, 3, padding=1), "d": nn.Dropout(0.5), "c": nn.Linear(64 * 216, 10)}, volumes)
def pooled_volumes(m: Any, b: Batch) -> Tensor:
    h = F.max_pool3d(m.a(b["x"]).relu(), 2)
    return classes(m.c(m.d(F.max_pool3d(m.b(h).relu(), 2).flatten(1))), b)

# Recommenders.
def clicks(n: int) -> Batch:
    """Return a user's items and dense features."""
    return {
        "u": torch.randint(20_000, (n,)),
        "i": torch.randint(20_000, (n, 30)),
        "d": torch.randn(n, 13),
        "t": torch.rand(n),
    }

def bce(scores: Tensor, batch: Batch) -> Tensor:
    """Return the binary cross-entropy of each sample."""
    return F.binary_cross_entropy_with_logits(scores, batch["t"], reduction="none")

@add("recommender", lambda: {"e": nn.EmbeddingBag(20_000, 64), "f": nn.Embedding(20_000, 64), "d": mlp(13, 128, 64), "t": mlp(67, 64, 1)}, clicks)
def dense_and_sparse(m: Any, b: Batch) -> Tensor:
    x = m.d(b["d"])
    parts = torch.stack([x, m.e(b["i"]), m.f(b["u"])], 1)
    i, j = torch.triu_indices(3, 3, 1)
    return bce(m.t(torch.cat([x, (parts @ parts.mT)[:, i, j]], 1)).squeeze(1), b)

@add("recommender", lambda: {"e": nn.Embedding(20_000, 32), "w": nn.Embedding(20_000, 1), "f": mlp(960, 128, 1)}, clicks)
def factorised(m: Any, b: Batch) -> Tensor:
    v = m.e(b["i"])
    pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1)
    return bce(pairs + m.w(b["i"]).sum((1, 2)) + m.f(v.flatten(1)).squeeze(1), b)

@add("recommender", lambda: {"e": nn.Embedding(20_000, 64), "u": mlp(64, 128, 64), "i": mlp(64, 128, 64)}, clicks)
def two_towers(m: Any, b: Batch) -> Tensor:
    scores = (m.i(m.e(b["i"])) @ F.normalize(m.u(m.e(b["u"])), dim=-1).unsqueeze(-1)).squeeze(-1)
    return -scores.log_softmax(1)[:, 0]

@add("recommender", lambda: {"e": nn.Embedding(20_000, 64), "f": mlp(128, 64, 32), "o": nn.Linear(96, 1)}, clicks)
def neural_filtering(m: Any, b: Batch) -> Tensor:
    u, i = m.e(b["u"]), m.e(b["i"][:, 0])
    return bce(m.o(torch.cat([u * i, m.f(torch.cat([u, i], 1))], 1)).squeeze(1), b)

@add("recommender", lambda: {"e": nn.Embedding(20_000, 16), "w": nn.ModuleList(nn.Linear(493, 493) for _ in range(3)), "o": nn.Linear(493, 1)}, clicks)
def crosses(m: Any, b: Batch) -> Tensor:
    x = first = torch.cat([m.e(b["i"]).flatten(1), b["d"]], 1)
    for layer in m.w:
        x = first * layer(x) + x
    return bce(m.o(x).squeeze(1), b)

@add("recommender", lambda: {"e": nn.Embedding(20_000, 64, padding_idx=0), "a": nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)}, clicks)
def next_item_by_attention(m: Any, b: Batch) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(29)
    h = m.a(m.e(b["i"][:, :-1]), src_mask=mask, is_causal=True)
    right, wrong = (h * m.e(b["i"][:, 1:])).sum(-1), (h * m.e(b["i"][:, 1:].flip(1))).sum(-1)
    return (F.softplus(-right) + F.softplus(wrong)).mean(1)

@add("recommender", lambda: {"e": nn.Embedding(20_000, 48), "a": mlp(192, 64, 1), "o": mlp(96, 64, 1)}, clicks)
def interest_by_target(m: Any, b: Batch) -> Tensor:
    items, target = m.e(b["i"]), m.e(b["u"]).unsqueeze(1).expand(-1, 30, -1)
    weight = m.a(torch.cat([items, target, items - target, items * target], -1))
    weight = weight.masked_fill((b["i"] % 7 == 0).unsqueeze(-1), -1e9).softmax(1)
    return bce(m.o(torch.cat([(weight * items).sum(1), target[:, 0]], 1)).squeeze(1), b)

@add("recommender", lambda: {"e": nn.Embedding(20_000, 64), "g": nn.GRU(64, 96, batch_first=True), "o": nn.Linear(96, 64)}, clicks)
def sessions_by_gru(m: Any, b: Batch) -> Tensor:
    h = m.o(m.g(m.e(b["i"][:, :-1]))[0])
    return F.softplus(-(h * m.e(b["i"][:, 1:])).sum(-1)).mean(1)

@add("recommender", lambda: {"e": nn.Embedding(20_000, 32), "x": nn.ModuleList(mlp(960, 64) for _ in range(4)), "g": nn.Linear(960, 8), "o": nn.ModuleList(nn.Linear(64, 1) for _ in range(2))}, clicks)
def mixture_of_tasks(m: Any, b: Batch) -> Tensor:
    x = m.e(b["i"]).flatten(1)
    experts, gates = torch.stack([e(x) for e in m.x], 1), m.g(x).unflatten(1, (2, 4)).softmax(-1)
    return bce(sum(o((gates[:, k].unsqueeze(-1) * experts).sum(1)).squeeze(1) for k, o in enumerate(m.o)), b)

# Gradients of gradients.
def pictures(n: int) -> Batch:
    """Return images with labels."""
    return {"x": torch.randn(n, 3, 32, 32), "y": y(n)}

def slope(outputs: Tensor, inputs: Tensor) -> Tensor:
    """Return the gradient of the sum of outputs, with a graph."""
    return torch.autograd.grad(outputs.sum(), inputs, create_graph=True)[0]

def critic() -> dict[str, Any]:
    """Return a critic of images."""
    return {
        "f": nn.Sequential(
            nn.Conv2d(3, 48, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(48, 96, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(6144, 1),
        )
    }

@add("double backward", critic, pictures)
def interpolated_penalty(m: Any, b: Batch) -> Tensor:
    real, noise = b["x"], torch.randn_like(b["x"])
    mixed = (0.5 * real + 0.5 * noise).requires_grad_()
    norm = slope(m.f(mixed), mixed).flatten(1).norm(dim=1)
    return (m.f(noise) - m.f(real)).squeeze(1) + 10 * (norm - 1).square()

@add("double backward", critic, pictures)
def penalty_on_real_images(m: Any, b: Batch) -> Tensor:
    x = b["x"].detach().requires_grad_()
    score = m.f(x)
    return F.softplus(-score).squeeze(1) + 5 * slope(score, x).square().sum((1, 2, 3))

@add("double backward", lambda: {"e": nn.Linear(1, 32), "f": mlp(32, 64, 1)}, lambda n: {"p": torch.randn(n, 20, 3), "t": torch.randn(n, 20, 3)})
def forces_of_pairs(m: Any, b: Batch) -> Tensor:
    p = b["p"].detach().requires_grad_()
    d = (p.unsqueeze(2) - p.unsqueeze(1)).square().sum(-1, keepdim=True)
    energy = m.f(m.e((-d).exp()).tanh().sum(2).tanh())
    return (slope(energy, p) + b["t"]).square().mean((1, 2))

@add("double backward", lambda: {"e": nn.Embedding(20, 64), "w": mlp(20, 64, 64), "f": mlp(64, 64, 1)}, lambda n: {"p": torch.randn(n, 24, 3), "z": torch.randint(20, (n, 24)), "t": torch.randn(n)})
def continuous_filters(m: Any, b: Batch) -> Tensor:
    p, h = b["p"].detach().requires_grad_(), m.e(b["z"])
    d = ((p.unsqueeze(2) - p.unsqueeze(1)).square().sum(-1, keepdim=True) + 1e-6).sqrt()
    w = m.w((-(d - torch.linspace(0, 5, 20)).square()).exp())
    for _ in range(2):
        h = h + (w * h.unsqueeze(1)).sum(2).tanh()
    energy = m.f(h).sum((1, 2))
    return (energy - b["t"]).square() + slope(energy, p).square().mean((1, 2))

@add("double backward", lambda: {"f": nn.Sequential(nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))}, lambda n: {"x": torch.rand(n, 100, 2)})
def heat_equation(m: Any, b: Batch) -> Tensor:
    x = b["x"].detach().requires_grad_()
    first = slope(m.f(x), x)
    second = slope(first[..., 0], x)[..., 0]
    return (first[..., 1] - 0.1 * second).square().mean(1)

@add("double backward", lambda: {"f": nn.Linear(64, 128), "g": nn.Linear(128, 10)}, lambda n: {"x": torch.randn(n, 20, 64), "l": torch.randint(10, (n, 20))})
def inner_steps(m: Any, b: Batch) -> Tensor:
    w, v = m.f.weight, m.g.weight
    for _ in range(2):
        inner = F.cross_entropy(((b["x"][:, :10] @ w.T).relu() @ v.T).flatten(0, 1), b["l"][:, :10].flatten())
        dw, dv = torch.autograd.grad(inner, (w, v), create_graph=True)
        w, v = w - 0.1 * dw, v - 0.1 * dv
    return F.cross_entropy(((b["x"][:, 10:] @ w.T).relu() @ v.T).mT, b["l"][:, 10:], reduction="none").mean(1)

@add("double backward", lambda: {"f": mlp(3072, 256, 64), "g": mlp(64, 256, 3072)}, pictures)
def contractive_autoencoder(m: Any, b: Batch) -> Tensor:
    x = b["x"].flatten(1).requires_grad_()
    code = m.f(x).sigmoid()
    return (m.g(code) - x).square().mean(1) + slope(code * torch.randn_like(code), x).square().sum(1)

@add("double backward", lambda: {"f": nn.Sequential(nn.Linear(50, 256), nn.Softplus(), nn.Linear(256, 256), nn.Softplus(), nn.Linear(256, 50))}, lambda n: {"x": torch.randn(n, 50)})
def sliced_score(m: Any, b: Batch) -> Tensor:
    x = b["x"].detach().requires_grad_()
    v, score = torch.randn_like(x), m.f(x)
    return (slope((score * v).sum(1), x) * v).sum(1) + 0.5 * score.square().sum(1)
