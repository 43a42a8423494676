"""More models for `plan_unseen.py`: sizes that depend on data, sequences and signals, and others."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from unseen_models import Batch, add, classes, mlp, pictures, y


# fmt: off
# Sizes that depend on data.
def tokens(n: int) -> Batch:
    """Return tokens, of which some count, with lengths."""
    lengths = torch.arange(n) % 24 + 8
    return {
        "t": torch.randint(1, 1000, (n, 32)),
        "m": torch.arange(32) < lengths.unsqueeze(1),
        "len": lengths,
        "y": y(n),
    }

@add("data-dependent", lambda: {"e": nn.Embedding(1000, 64), "g": nn.Linear(64, 4), "x": nn.ModuleList(mlp(64, 256, 64) for _ in range(4)), "c": nn.Linear(64, 10)}, tokens)
def experts_by_nonzero(m: Any, b: Batch) -> Tensor:
    h = m.e(b["t"])
    flat, out = h.flatten(0, 1), torch.zeros_like(h).flatten(0, 1)
    weight, chosen = m.g(flat).softmax(-1).topk(2)
    for k, expert in enumerate(m.x):
        row, slot = (chosen == k).nonzero(as_tuple=True)
        out = out.index_add(0, row, expert(flat[row]) * weight[row, slot].unsqueeze(-1))
    return classes(m.c(out.view_as(h).mean(1)), b)

@add("data-dependent", lambda: {"e": nn.Embedding(1000, 64), "g": nn.Linear(64, 4), "x": nn.ModuleList(mlp(64, 128, 64) for _ in range(4)), "c": nn.Linear(64, 10)}, tokens)
def experts_by_counts(m: Any, b: Batch) -> Tensor:
    flat = m.e(b["t"]).flatten(0, 1)
    gate, chosen = m.g(flat).softmax(-1).max(-1)
    order = chosen.argsort()
    parts = flat[order].split(torch.bincount(chosen, minlength=4).tolist())
    made = torch.cat([x(part) for x, part in zip(m.x, parts, strict=True)])
    out = torch.empty_like(made).index_copy(0, order, made) * gate.unsqueeze(-1)
    return classes(m.c(out.unflatten(0, (-1, 32)).mean(1)), b)

@add("data-dependent", lambda: {"e": nn.Embedding(1000, 96), "f": nn.Linear(96, 1000)}, tokens)
def masked_tokens_only(m: Any, b: Batch) -> Tensor:
    return F.cross_entropy(m.f(m.e(b["t"])[b["m"]]), b["t"][b["m"]])

@add("data-dependent", lambda: {"e": nn.Embedding(1000, 96), "f": nn.Linear(96, 1000)}, tokens)
def selected_losses(m: Any, b: Batch) -> Tensor:
    losses = F.cross_entropy(m.f(m.e(b["t"])).mT, b["t"], reduction="none")
    return losses.masked_select(b["m"]).mean()

@add("data-dependent", lambda: {"e": nn.Linear(3072, 128), "f": nn.Linear(128, 128), "c": nn.Linear(128, 10)}, pictures)
def until_converged(m: Any, b: Batch) -> Tensor:
    x = m.e(b["x"].flatten(1))
    z, last = torch.zeros_like(x), None
    while last is None or (z - last).norm() > 1e-3 * z.norm():
        last, z = z, (0.3 * m.f(z) + x).tanh()
    return classes(m.c(z), b)

@add("data-dependent", lambda: {"e": nn.Linear(3072, 128), "f": nn.Linear(128, 128), "h": nn.Linear(128, 1), "c": nn.Linear(128, 10)}, pictures)
def adaptive_steps(m: Any, b: Batch) -> Tensor:
    x, halted = m.e(b["x"].flatten(1)).tanh(), torch.zeros(len(b["x"]))
    while bool((halted < 0.99).any()):
        x = m.f(x).tanh() + x
        halted = halted + 0.2 + 0.2 * m.h(x).squeeze(1).sigmoid()
    return classes(m.c(x), b)

@add("data-dependent", lambda: {"e": nn.Embedding(1000, 128), "f": mlp(128, 256, 128), "c": nn.Linear(128, 10)}, tokens)
def each_token_once(m: Any, b: Batch) -> Tensor:
    found, where = b["t"].unique(return_inverse=True)
    return classes(m.c(m.f(m.e(found))[where].mean(1)), b)

@add("data-dependent", lambda: {"e": nn.Embedding(1000, 64), "c": nn.Linear(64, 1000)}, tokens)
def hard_tokens(m: Any, b: Batch) -> Tensor:
    losses = F.cross_entropy(m.c(m.e(b["t"])).mT, b["t"], reduction="none").flatten()
    return losses.topk(int(b["m"].sum()) // 2).values.mean()

@add("data-dependent", lambda: {"e": nn.Embedding(1000, 64), "f": nn.Conv1d(64, 128, 5, padding=2), "o": nn.Linear(128, 80)}, tokens)
def repeated_by_lengths(m: Any, b: Batch) -> Tensor:
    h = m.e(b["t"]).flatten(0, 1).repeat_interleave((b["t"] % 3 + 1).flatten(), 0)
    return m.o(m.f(h.T.unsqueeze(0)).relu().mT).square().mean()

@add("data-dependent", lambda: {"f": nn.Conv2d(3, 32, 3, padding=1), "s": nn.Conv2d(32, 1, 1), "h": mlp(32, 128, 10)}, pictures)
def proposals_above_a_score(m: Any, b: Batch) -> Tensor:
    h = m.f(b["x"]).relu()
    keep = b["x"][:, 0] > 0.5
    chosen = h.permute(0, 2, 3, 1)[keep]
    return m.h(chosen).logsumexp(1).mean() + m.s(h).square().mean()

@add("data-dependent", lambda: {"g": nn.GRU(40, 96, 2, batch_first=True, bidirectional=True), "o": nn.Linear(192, 30)}, lambda n: {"x": torch.randn(n, 60, 40), "t": torch.randint(1, 30, (n, 10))})
def alignment_by_ctc(m: Any, b: Batch) -> Tensor:
    n, logits = len(b["x"]), m.o(m.g(b["x"])[0]).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(logits, b["t"], torch.full((n,), 60), torch.full((n,), 10), reduction="none") / 10

@add("data-dependent", lambda: {"e": nn.Embedding(1000, 64), "l": nn.LSTM(64, 96, batch_first=True), "c": nn.Linear(96, 10)}, tokens)
def packed_lstm(m: Any, b: Batch) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(m.e(b["t"]), b["len"], batch_first=True, enforce_sorted=False)
    return classes(m.c(m.l(packed)[1][0][-1]), b)

@add("data-dependent", lambda: {"e": nn.Embedding(1000, 64), "l": nn.ModuleList(mlp(64, 128, 64) for _ in range(4)), "c": nn.Linear(64, 10)}, tokens)
def exit_by_confidence(m: Any, b: Batch) -> Tensor:
    h = m.e(b["t"]).mean(1)
    for layer in m.l:
        h = h + layer(h)
        if m.c(h).softmax(-1).amax(-1).mean().item() > 0.9:
            break
    return classes(m.c(h), b)

# Sequences and signals.
def signals(n: int) -> Batch:
    """Return signals with labels."""
    return {"x": torch.randn(n, 4000), "y": y(n)}

@add("sequences", lambda: {"e": nn.Embedding(1000, 64), "l": nn.LSTM(64, 96, 2, batch_first=True, bidirectional=True), "o": nn.Linear(192, 20)}, tokens)
def tagger(m: Any, b: Batch) -> Tensor:
    return F.cross_entropy(m.o(m.l(m.e(b["t"]))[0]).mT, b["t"] % 20, reduction="none").mean(1)

@add("sequences", lambda: {"e": nn.Conv1d(1, 64, 16, 8), "d": nn.ModuleList(nn.Conv1d(64, 64, 3, padding=2**k, dilation=2**k, groups=64) for k in range(3)), "n": nn.GroupNorm(1, 64), "o": nn.ConvTranspose1d(64, 1, 16, 8)}, signals)
def separated_sources(m: Any, b: Batch) -> Tensor:
    first = h = m.e(b["x"].unsqueeze(1)).relu()
    for layer in m.d:
        h = h + F.silu(m.n(layer(h)))
    made = m.o(first * h.sigmoid()).squeeze(1)
    return (made - b["x"][:, : made.shape[1]]).square().mean(1)

@add("sequences", lambda: {"f": nn.Conv2d(1, 32, 3, padding=1), "g": nn.Conv2d(32, 64, 3, 2, 1), "c": nn.Linear(64, 10)}, signals)
def spectrogram(m: Any, b: Batch) -> Tensor:
    window = torch.hann_window(256)
    h = torch.stft(b["x"], 256, 64, window=window, return_complex=True).abs().log1p().unsqueeze(1)
    return classes(m.c(m.g(m.f(h).relu()).relu().mean((2, 3))), b)

@add("sequences", lambda: {"e": nn.Conv1d(1, 48, 1), "g": nn.ModuleList(nn.Conv1d(48, 96, 2, dilation=2**k) for k in range(6)), "o": nn.Conv1d(48, 64, 1)}, signals)
def gated_waves(m: Any, b: Batch) -> Tensor:
    h = m.e(b["x"][:, None, :1024])
    for k, layer in enumerate(m.g):
        a, gate = layer(F.pad(h, (2**k, 0))).chunk(2, 1)
        h = h + a.tanh() * gate.sigmoid()
    return F.cross_entropy(m.o(h), (b["x"][:, :1024] * 10).long() % 64, reduction="none").mean(1)

@add("sequences", lambda: {"w": nn.ModuleList(nn.utils.parametrizations.weight_norm(nn.Conv1d(c, 64, 3, padding=1)) for c in (1, 64, 64)), "c": nn.Linear(64, 10)}, signals)
def normed_weights(m: Any, b: Batch) -> Tensor:
    h = b["x"].unsqueeze(1)
    for layer in m.w:
        h = F.max_pool1d(layer(h).relu(), 2)
    return classes(m.c(h.mean(2)), b)

@add("sequences", lambda: {"e": nn.Embedding(1000, 64), "d": nn.Linear(64, 64), "o": nn.Linear(64, 10)}, tokens)
def scan_by_cumulative_sums(m: Any, b: Batch) -> Tensor:
    h = m.e(b["t"])
    decay = F.logsigmoid(m.d(h)).cumsum(1)
    return classes(m.o(((h * (-decay).exp()).cumsum(1) * decay.exp())[:, -1]), b)

@add("sequences", lambda: {"e": nn.Embedding(1000, 96), "f": nn.ModuleList(mlp(96, 192, 96) for _ in range(2)), "n": nn.LayerNorm(96), "c": nn.Linear(96, 10)}, tokens)
def mixing_by_fourier(m: Any, b: Batch) -> Tensor:
    h = m.e(b["t"])
    for layer in m.f:
        h = m.n(h + torch.fft.fft2(h.float()).real)
        h = h + layer(h)
    return classes(m.c(h.mean(1)), b)

@add("sequences", lambda: {"e": nn.Embedding(1000, 96), "a": nn.TransformerEncoder(nn.TransformerEncoderLayer(96, 6, 192, batch_first=True), 2), "c": nn.Linear(96, 10)}, tokens)
def encoder_with_padding(m: Any, b: Batch) -> Tensor:
    return classes(m.c(m.a(m.e(b["t"]), src_key_padding_mask=~b["m"]).mean(1)), b)

@add("sequences", lambda: {"e": nn.Embedding(1000, 64), "q": nn.Linear(64, 64), "k": nn.Linear(64, 64), "p": torch.randn(63, 4), "c": nn.Linear(64, 10)}, tokens)
def relative_positions(m: Any, b: Batch) -> Tensor:
    h = m.e(b["t"])
    q, k, v = (x.unflatten(-1, (4, 16)).transpose(1, 2) for x in (m.q(h), m.k(h), h))
    offset = torch.arange(32).unsqueeze(1) - torch.arange(32) + 31
    mixed = (q @ k.mT / 4 + m.p[offset].permute(2, 0, 1)).softmax(-1) @ v
    return classes(m.c(mixed.transpose(1, 2).flatten(2).mean(1)), b)

@add("sequences", lambda: {"f": mlp(20, 128, 1)}, lambda n: {"x": torch.randn(n, 60, 20), "t": torch.rand(n, 60)})
def survival(m: Any, b: Batch) -> Tensor:
    risk = m.f(b["x"]).squeeze(-1).gather(1, b["t"].argsort(1, descending=True))
    return (risk.logcumsumexp(1) - risk).mean(1)

# Everything else.
@add("other", lambda: {"f": mlp(63, 128, 128, 4)}, lambda n: {"x": torch.randn(n, 32, 48, 63), "t": torch.rand(n, 32, 3)})
def radiance(m: Any, b: Batch) -> Tensor:
    out = m.f(b["x"])
    alpha = 1 - (-out[..., 3].relu() * 0.1).exp()
    seen = torch.cat([torch.ones_like(alpha[..., :1]), 1 - alpha + 1e-10], -1).cumprod(-1)[..., :-1]
    return (((alpha * seen).unsqueeze(-1) * out[..., :3].sigmoid()).sum(2) - b["t"]).square().mean((1, 2))

@add("other", lambda: {"s": nn.ModuleList(mlp(32, 256, 64) for _ in range(4))}, lambda n: {"x": torch.randn(n, 64)})
def real_flow(m: Any, b: Batch) -> Tensor:
    z, total = b["x"], torch.zeros(len(b["x"]))
    for layer in m.s:
        kept, changed = z.chunk(2, 1)
        scale, shift = layer(kept).chunk(2, 1)
        z, total = torch.cat([changed * scale.tanh().exp() + shift, kept], 1), total + scale.tanh().sum(1)
    return 0.5 * z.square().sum(1) - total

@add("other", lambda: {"e": nn.Conv2d(3, 64, 4, 4), "k": torch.randn(256, 64), "d": nn.ConvTranspose2d(64, 3, 4, 4)}, pictures)
def quantised_codes(m: Any, b: Batch) -> Tensor:
    h = m.e(b["x"]).permute(0, 2, 3, 1)
    code = m.k[torch.cdist(h.detach().flatten(0, 2), m.k.detach()).argmin(1)].view_as(h)
    made = m.d((h + (code - h).detach()).permute(0, 3, 1, 2))
    return (made - b["x"]).square().mean((1, 2, 3)) + (code - h.detach()).square().mean((1, 2, 3))

@add("other", lambda: {"e": nn.Conv2d(3, 64, 5, 2, 2), "s": torch.randn(6, 64), "k": nn.Linear(64, 64), "g": nn.GRUCell(64, 64), "c": nn.Linear(64, 10)}, pictures)
def slots(m: Any, b: Batch) -> Tensor:
    h = m.e(b["x"]).flatten(2).mT
    s, k = m.s.expand(len(h), -1, -1), m.k(h)
    for _ in range(3):
        weight = (k @ s.mT / 8).softmax(-1) + 1e-8
        s = m.g(((weight / weight.sum(1, keepdim=True)).mT @ h).flatten(0, 1), s.flatten(0, 1)).view_as(s)
    return classes(m.c(s.mean(1)), b)

@add("other", lambda: {"l": nn.Conv2d(3, 6, 7, 4), "t": nn.Linear(294, 6), "f": nn.Conv2d(3, 32, 3, padding=1), "c": nn.Linear(32, 10)}, pictures)
def spatial_transformer(m: Any, b: Batch) -> Tensor:
    theta = m.t(m.l(b["x"]).relu().flatten(1)).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(b["x"].shape), align_corners=False)
    return classes(m.c(m.f(F.grid_sample(b["x"], grid, align_corners=False)).relu().mean((2, 3))), b)

@add("other", lambda: {"f": mlp(192, 256, 192)}, pictures)
def overlapping_patches(m: Any, b: Batch) -> Tensor:
    made = F.fold(m.f(F.unfold(b["x"], 8, stride=4).mT).mT, (32, 32), 8, stride=4)
    return (made - b["x"]).square().mean((1, 2, 3))

@add("other", lambda: {"a": nn.Conv2d(3, 16, 1), "w": torch.randn(16, 16, 9, 9, 2) / 16, "c": nn.Linear(16, 10)}, pictures)
def fourier_operator(m: Any, b: Batch) -> Tensor:
    h = m.a(b["x"])
    low = torch.fft.rfft2(h)[:, :, :9, :9]
    mixed = torch.einsum("bihw,iohw->bohw", low, torch.view_as_complex(m.w))
    return classes(m.c((h + torch.fft.irfft2(mixed, s=(32, 32))).relu().mean((2, 3))), b)

@add("other", lambda: {"p": nn.Conv2d(3, 64, 9, 4), "w": torch.randn(10, 288, 16, 8) / 10}, pictures)
def routed_capsules(m: Any, b: Batch) -> Tensor:
    u = torch.einsum("bnd,cnod->bcno", m.p(b["x"]).reshape(len(b["x"]), 288, 8), m.w)
    logits = torch.zeros_like(u[..., 0])
    for _ in range(3):
        s = (logits.softmax(1).unsqueeze(-1) * u).sum(2)
        v = s * s.norm(dim=-1, keepdim=True) / (1 + s.square().sum(-1, keepdim=True))
        logits = logits + (u * v.unsqueeze(2)).sum(-1)
    return classes(v.norm(dim=-1) * 10, b)

@add("other", lambda: {"f": mlp(16, 64, 32)}, lambda n: {"x": torch.randn(n, 40, 16), "t": torch.randn(n, 40, 16)})
def optimal_transport(m: Any, b: Batch) -> Tensor:
    cost = torch.cdist(m.f(b["x"]), m.f(b["t"])).square()
    u = v = torch.zeros(len(cost), 40)
    for _ in range(10):
        u = -torch.logsumexp(v.unsqueeze(1) - cost, 2)
        v = -torch.logsumexp(u.unsqueeze(2) - cost, 1)
    return ((u.unsqueeze(2) + v.unsqueeze(1) - cost).exp() * cost).sum((1, 2))

@add("other", lambda: {"f": mlp(8, 32, 16)}, lambda n: {"x": torch.randn(n, 50, 8), "t": torch.randn(n, 50, 1)})
def gaussian_process(m: Any, b: Batch) -> Tensor:
    h = m.f(b["x"])
    root = torch.linalg.cholesky(h @ h.mT + 0.1 * torch.eye(50))
    weight = torch.cholesky_solve(b["t"], root)
    return (b["t"] * weight).sum((1, 2)) + root.diagonal(dim1=1, dim2=2).log().sum(1)

@add("other", lambda: {"h": mlp(16, 64, 16 * 3 * 9), "c": nn.Linear(16, 10)}, lambda n: {**pictures(n), "z": torch.randn(n, 16)})
def generated_filters(m: Any, b: Batch) -> Tensor:
    n = len(b["x"])
    h = F.conv2d(b["x"].view(1, n * 3, 32, 32), m.h(b["z"]).view(n * 16, 3, 3, 3), padding=1, groups=n)
    return classes(m.c(h.view(n, 16, 32, 32).relu().mean((2, 3))), b)

@add("other", lambda: {"f": nn.ModuleList(mlp(32, 64, 5) for _ in range(4))}, lambda n: {"x": torch.randn(n, 20, 32), "t": torch.randint(5, (n, 20))})
def product_of_experts(m: Any, b: Batch) -> Tensor:
    p = torch.stack([f(b["x"]).softmax(-1) for f in m.f]).prod(0)
    return -(p / p.sum(-1, keepdim=True)).gather(2, b["t"].unsqueeze(-1)).log().mean((1, 2))

@add("other", lambda: {"a": nn.Conv2d(3, 32, 3, padding=1), "b": nn.Conv2d(32, 12, 3, padding=1)}, pictures)
def sharper_pictures(m: Any, b: Batch) -> Tensor:
    small = F.avg_pool2d(b["x"], 2)
    return (F.pixel_shuffle(m.b(m.a(small).relu()), 2) - b["x"]).abs().mean((1, 2, 3))

@add("other", lambda: {"f": nn.Conv2d(3, 32, 3, 2, 1), "s": mlp(32, 8, 32), "d": nn.Conv2d(32, 32, 3, padding=1, groups=32), "p": nn.Conv2d(32, 64, 1), "n": nn.BatchNorm2d(64), "c": nn.Linear(64, 10)}, pictures)
def squeezed_channels(m: Any, b: Batch) -> Tensor:
    h = F.hardswish(m.f(b["x"]))
    h = m.d(h) * F.hardsigmoid(m.s(h.mean((2, 3)))).unsqueeze(-1).unsqueeze(-1)
    return classes(m.c(F.hardswish(m.n(m.p(h))).mean((2, 3))), b)

@add("other", lambda: {"f": mlp(9, 64, 64, 8)}, lambda n: {"x": torch.randn(n, 64, 8)})
def solver_of_fourth_order(m: Any, b: Batch) -> Tensor:
    def rate(t: float, x: Tensor) -> Tensor:
        return m.f(torch.cat([x, torch.full_like(x[..., :1], t)], -1)).tanh()

    x, h = b["x"], 0.25
    for step in range(4):
        a = rate(step * h, x)
        c = rate((step + 0.5) * h, x + h / 2 * a)
        d = rate((step + 0.5) * h, x + h / 2 * c)
        x = x + h / 6 * (a + 2 * c + 2 * d + rate((step + 1) * h, x + h * d))
    return x.square().mean((1, 2)) * math.pi

# fmt: on


def waves(num_targets: int | None) -> Callable[[int], Batch]:
    """Return a function (samples) -> sound with a class, or with this many characters."""
    most, shape = (2, ()) if num_targets is None else (40, (num_targets,))
    return lambda n: {"input_values": torch.randn(n, 8000), "labels": torch.randint(1, most, (n, *shape))}


def images(n: int, side: int) -> Batch:
    """Return images."""
    return {"pixel_values": torch.randn(n, 3, side, side)}


def words(n: int, length: int) -> Batch:
    """Return tokens."""
    return {"input_ids": torch.randint(3, 900, (n, length))}


def inputs_of_transformers(transformers: Any) -> dict[str, tuple[Any, Callable[[int], Batch]]]:
    """Return configurations and batches of models that take sound, video, boxes or several inputs, by class."""
    small = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 4, "num_hidden_layers": 2}
    sound = {**small, "conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "vocab_size": 40}
    return {
        "HubertForCTC": (transformers.HubertConfig(**sound), waves(8)),
        "Wav2Vec2ForCTC": (transformers.Wav2Vec2Config(**sound), waves(8)),
        "Wav2Vec2ForSequenceClassification": (transformers.Wav2Vec2Config(**sound), waves(None)),
        "WhisperForConditionalGeneration": (
            transformers.WhisperConfig(
                d_model=96,
                encoder_layers=2,
                decoder_layers=2,
                encoder_ffn_dim=192,
                decoder_ffn_dim=192,
                vocab_size=900,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
            ),
            lambda n: {"input_features": torch.randn(n, 80, 3000), "labels": torch.randint(3, 900, (n, 30))},
        ),
        "CLIPModel": (
            transformers.CLIPConfig(
                text_config={**small, "vocab_size": 900},
                vision_config={**small, "image_size": 64, "patch_size": 16},
            ),
            lambda n: {**images(n, 64), "input_ids": torch.randint(3, 900, (n, 20)), "return_loss": True},
        ),
        "ViltForQuestionAnswering": (
            transformers.ViltConfig(**small, vocab_size=900, image_size=96, patch_size=16, num_labels=20),
            lambda n: {
                **images(n, 96),
                "input_ids": torch.randint(3, 900, (n, 20)),
                "labels": torch.rand(n, 20),
                "pixel_mask": torch.ones(n, 96, 96, dtype=torch.int64),
            },
        ),
        "DetrForObjectDetection": (
            transformers.DetrConfig(
                use_timm_backbone=False,
                use_pretrained_backbone=False,
                backbone=None,
                backbone_config=transformers.ResNetConfig(
                    embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], out_features=["stage2"]
                ),
                d_model=96,
                encoder_layers=2,
                decoder_layers=2,
                encoder_ffn_dim=192,
                decoder_ffn_dim=192,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                num_queries=20,
                num_labels=10,
            ),
            lambda n: {
                "pixel_values": torch.randn(n, 3, 96, 96),
                "labels": [
                    {"class_labels": torch.randint(10, (3,)), "boxes": torch.rand(3, 4) / 2 + 0.25} for _ in range(n)
                ],
            },
        ),
        "VideoMAEForVideoClassification": (
            transformers.VideoMAEConfig(**small, image_size=64, patch_size=16, num_frames=8),
            lambda n: {"pixel_values": torch.randn(n, 8, 3, 64, 64), "labels": torch.randint(2, (n,))},
        ),
        "LayoutLMForTokenClassification": (
            transformers.LayoutLMConfig(**small, vocab_size=900),
            lambda n: {**words(n, 64), "labels": torch.randint(2, (n, 64)), "bbox": torch.randint(999, (n, 64, 4))},
        ),
        "PatchTSTForPrediction": (
            transformers.PatchTSTConfig(num_input_channels=7, context_length=96, prediction_length=24, d_model=64),
            lambda n: {"past_values": torch.randn(n, 96, 7), "future_values": torch.randn(n, 24, 7)},
        ),
    }
