"""Models, losses and batches with one fault each, and the same after the fix that `check` recommends."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab

Batch = dict[str, Tensor]
NUM_SAMPLES, NUM_FEATURES, NUM_CLASSES, NUM_WORDS, LENGTH = 12, 6, 4, 13, 7
CLASS_WEIGHTS = torch.tensor([0.2, 3.0, 1.0, 0.5], dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Subject:
    """Functions that return the model, the declared loss and the batch to check."""

    model: Callable[[], Any]
    loss: Callable[[], Any]
    batch: Callable[[], Batch]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, its expected code, place and a word of the recommended fix, and the subject with that fix."""

    subject: Subject
    code: str
    where: str
    change: str
    mended: Subject


def images() -> Batch:
    """Return small images of four classes with different frequencies."""
    random = torch.Generator().manual_seed(1)
    labels = torch.tensor([0, 1, 1, 2, 3, 0, 2, 2, 1, 3, 3, 3])
    return {"image": torch.randn(NUM_SAMPLES, 1, 6, 6, generator=random), "label": labels}


def vectors() -> Batch:
    """Return pairs of vectors, and classes."""
    random = torch.Generator().manual_seed(2)
    x, y = torch.randn(2, NUM_SAMPLES, NUM_FEATURES, generator=random).unbind()
    return {"x": x, "y": y, "label": images()["label"]}


def sentences() -> Batch:
    """Return sentences of different lengths, labels with -100 at padding, and the matching mask."""
    random = torch.Generator().manual_seed(3)
    words = torch.randint(0, NUM_WORDS, (NUM_SAMPLES, LENGTH), generator=random)
    lengths = torch.tensor([7, 2, 5, 7, 1, 3, 6, 2, 7, 4, 1, 5])
    there = torch.arange(LENGTH) < lengths[:, None]
    return {"words": words, "labels": words.where(there, -100), "mask": there.long()}


class Network(nn.Module):
    """A convolutional network with the given normalization."""

    def __init__(self, norm: Callable[[int], nn.Module] | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = norm(4) if norm else nn.Identity()
        self.head = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(144, NUM_CLASSES))

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.conv(image)))
        return logits


class LanguageModel(nn.Module):
    """A recurrent language model; `between` gets its hidden states."""

    def __init__(self, between: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(NUM_WORDS, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.between = between()
        self.head = nn.Linear(8, NUM_WORDS)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.between(self.rnn(self.embed(words))[0]))
        return logits


class Encoder(nn.Module):
    """A perceptron; `between` gets its hidden layer."""

    def __init__(self, between: Callable[[], nn.Module] = nn.Identity, out: int = NUM_CLASSES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(NUM_FEATURES, 10)
        self.between = between()
        self.second = nn.Linear(10, out)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(self.between(torch.tanh(self.first(x))))
        return logits


class MinusBatchMean(nn.Module):
    """Couples samples in training mode only, as hand-written normalizations do."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0, keepdim=True) if self.training else x


class AcrossBatch(nn.Module):
    """Attends over the batch axis in every mode."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = torch.softmax(x @ x.T, dim=-1) @ self.mix(x)
        return x + mixed


class InEvaluationMode(nn.Module):
    """Keeps a module in evaluation mode, even after `train()`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner.eval()(x)
        return out


class Alone(nn.Module):
    """Attends from each sample to itself only."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        one = x[:, None]
        out: Tensor = self.attention(one, one, one)[0][:, 0]
        return x + out


class Noise(nn.Module):
    """Adds noise, in evaluation mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class Memory(nn.Module):
    """Scales by the number of its calls, kept in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


class Counting(nn.Module):
    """Scales by the number of its calls, kept in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return x * (1 + 0.1 * self.number)


class RunningMean(nn.Module):
    """Subtracts a running mean that it updates before, as some normalizations without batch statistics do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(10))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class TimesSamples(torch.autograd.Function):
    """The identity, whose backward multiplies by the number of samples, as layers that reverse gradients do."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:  # noqa: ARG004 (torch's protocol)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return -0.1 * len(gradient) * gradient


class Reversal(nn.Module):
    """Reverses gradients, by a factor that depends on the number of samples."""

    def forward(self, x: Tensor) -> Tensor:
        reversed_x: Tensor = TimesSamples.apply(x)  # type: ignore[no-untyped-call]
        return reversed_x


class Variational(nn.Module):
    """A variational autoencoder: draws in its forward, in training and evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.decode = nn.Linear(NUM_FEATURES, 8), nn.Linear(4, NUM_FEATURES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x).chunk(2, dim=1)
        return self.decode(mean + torch.randn_like(mean) * (0.5 * log_variance).exp()), mean, log_variance


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over samples."""
    return F.cross_entropy(model(batch["image"]), batch["label"])


def classify_sum(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum over samples."""
    return F.cross_entropy(model(batch["image"]), batch["label"], reduction="sum")


def classify_weighted(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean, weighted by class."""
    return F.cross_entropy(model(batch["image"]), batch["label"], weight=CLASS_WEIGHTS)


def predict(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over unmasked targets, without a shift."""
    return F.cross_entropy(model(batch["words"]).mT, batch["labels"])


def predict_shifted(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over the unmasked next words."""
    return F.cross_entropy(model(batch["words"])[:, :-1].mT, batch["labels"][:, 1:])


def predict_by_mask(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over the positions that the mask marks."""
    each = F.cross_entropy(model(batch["words"]).mT, batch["words"], reduction="none")
    return (each * batch["mask"]).sum() / batch["mask"].sum()


def predict_and_regularise(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return a mean over targets and one over samples."""
    logits = model(batch["words"])
    return {"lm": F.cross_entropy(logits.mT, batch["labels"]), "size": logits.square().mean()}


def separate(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of the encoder's classes."""
    return F.cross_entropy(model(batch["x"]), batch["label"])


def smoothness(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy with a penalty on the gradient of the input."""
    x = batch["x"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    penalty: Tensor = (gradient.norm(dim=1) - 1).square().mean()
    return separate(model, batch) + penalty


def contrast(model: nn.Module, batch: Batch) -> Tensor:
    """Return InfoNCE: each x against all y of the batch."""
    logits = F.normalize(model(batch["x"]), dim=1) @ F.normalize(model(batch["y"]), dim=1).T
    return F.cross_entropy(logits * 5, torch.arange(len(logits)))


def batch_dice(model: nn.Module, batch: Batch) -> Tensor:
    """Return one minus the overlap of all samples of the batch together."""
    overlap, size = dice_parts(model, batch)
    return 1 - (2 * overlap.sum() + 1) / (size.sum() + 1)


def sample_dice(model: nn.Module, batch: Batch) -> Tensor:
    """Return one minus the overlap of each sample, averaged."""
    overlap, size = dice_parts(model, batch)
    loss: Tensor = (1 - (2 * overlap + 1) / (size + 1)).mean()
    return loss


def dice_parts(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the overlap of predictions and targets, and their size, for each sample."""
    found = torch.sigmoid(model(batch["x"]))
    wanted = F.one_hot(batch["label"], NUM_CLASSES).to(found)
    return (found * wanted).sum(1), (found + wanted).sum(1)


def hardest(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean of the largest third of the losses of the batch."""
    return hardest_third(model, (model(batch["x"]), batch["label"]))


def hardest_third(model: nn.Module, outputs: tuple[Tensor, Tensor]) -> Tensor:  # noqa: ARG001 (the form of ab.joint)
    """Return the mean of the largest third of the losses of a whole batch."""
    each = F.cross_entropy(*outputs, reduction="none")
    return each.topk(max(1, len(each) // 3)).values.mean()


def labelled(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the outputs with their labels."""
    return model(batch["x"]), batch["label"]


def both(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return both sides' representations."""
    return model(batch["x"]), model(batch["y"])


def attract(model: nn.Module, outputs: tuple[Tensor, Tensor]) -> Tensor:  # noqa: ARG001 (the form that ab.joint takes)
    """Return InfoNCE of the representations of a whole batch."""
    one, other = (F.normalize(side, dim=1) for side in outputs)
    return F.cross_entropy(one @ other.T * 5, torch.arange(len(one)))


def evidence_bound(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a variational autoencoder."""
    found, mean, log_variance = model(batch["x"])
    error = (found - batch["x"]).square().sum(1)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
    loss: Tensor = (error + divergence).mean()
    return loss


def denoise(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a diffusion model: times and noise are drawn for each sample."""
    x = batch["x"]
    time, noise = torch.rand(len(x), 1, dtype=x.dtype), torch.randn_like(x)
    return F.mse_loss(model((1 - time) * x + time * noise), noise)


def scaled_by_maximum(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of inputs divided by the largest value of the batch."""
    return F.cross_entropy(model(batch["x"] / batch["x"].abs().max()), batch["label"])


def mixed_up(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of pairs drawn within the batch."""
    order = torch.randperm(len(batch["x"]))
    return F.cross_entropy(model(0.7 * batch["x"] + 0.3 * batch["x"][order]), batch["label"])


def as_sum(model: nn.Module, batch: Batch) -> ab.LossSum:
    """Return the sum with its count."""
    return ab.LossSum(classify_sum(model, batch), len(batch["label"]))


def weights_of(batch: Batch) -> Tensor:
    """Return the sum of the class weights."""
    return CLASS_WEIGHTS[batch["label"]].sum()


def mean(function: Any) -> Callable[[], Any]:
    """Return a function that declares a mean over samples."""
    return lambda: ab.mean_over_samples(function)


def group_norm(channels: int) -> nn.Module:
    """Return a per-sample normalization."""
    return nn.GroupNorm(2, channels)


def of_layer(
    between: Callable[[], nn.Module], code: str, where: str, change: str, mended: Callable[[], nn.Module] = nn.Identity
) -> Fault:
    """Return the fault of a layer within a perceptron."""
    wrong, right = (Subject(partial(Encoder, one), mean(separate), vectors) for one in (between, mended))
    return Fault(wrong, code, where, change, right)


def of_loss(loss: Any, mended: Any, where: str, change: str) -> Fault:
    """Return the fault of a loss that couples samples."""
    wrong, right = (Subject(Encoder, mean(one), vectors) for one in (loss, mended))
    return Fault(wrong, "couples_samples", where, change, right)


FAULTS: Mapping[str, Fault] = {
    "token mean declared over samples": Fault(
        Subject(LanguageModel, mean(predict), sentences),
        "loss_declaration",
        "loss",
        "ab.mean_over_tokens(loss, labels='labels', shift=False)",
        Subject(LanguageModel, lambda: ab.mean_over_tokens(predict, shift=False), sentences),
    ),
    "sum declared as mean": Fault(
        Subject(Network, mean(classify_sum), images),
        "loss_declaration",
        "loss",
        "ab.LossSum",
        Subject(Network, lambda: as_sum, images),
    ),
    "one term over the wrong items": Fault(
        Subject(
            LanguageModel, lambda: ab.sum_of(predict_and_regularise, lm=ab.samples(), size=ab.samples()), sentences
        ),
        "loss_declaration",
        "lm",
        "lm=ab.tokens(labels='labels', shift=False)",
        Subject(
            LanguageModel,
            lambda: ab.sum_of(predict_and_regularise, lm=ab.tokens(shift=False), size=ab.samples()),
            sentences,
        ),
    ),
    "contrastive declared over samples": Fault(
        Subject(Encoder, mean(contrast), vectors),
        "joint_loss",
        "loss",
        "ab.joint",
        Subject(Encoder, lambda: ab.joint(both, attract), vectors),
    ),
    "Dice over the batch": Fault(
        Subject(Encoder, mean(batch_dice), vectors),
        "joint_loss",
        "loss",
        "ab.joint",
        Subject(Encoder, mean(sample_dice), vectors),
    ),
    "hardest samples of the batch": Fault(
        Subject(Encoder, mean(hardest), vectors),
        "joint_loss",
        "loss",
        "ab.joint",
        Subject(Encoder, lambda: ab.joint(labelled, hardest_third), vectors),
    ),
    "BatchNorm": Fault(
        Subject(lambda: Network(nn.BatchNorm2d), mean(classify), images),
        "batch_norm",
        "norm",
        "GroupNorm",
        Subject(lambda: Network(group_norm), mean(classify), images),
    ),
    "a custom normalisation": of_layer(
        MinusBatchMean, "batch_norm", "between", "independently", lambda: nn.LayerNorm(10)
    ),
    "attention over the batch": of_layer(AcrossBatch, "couples_samples", "between", "process samples independently"),
    "a module that counts its calls": of_layer(Memory, "state", "between.calls", "once per optimizer step"),
    "an attribute that counts calls": of_layer(Counting, "state", "between.number", "once per optimizer step"),
    "a running mean in a buffer": of_layer(RunningMean, "state", "between.mean", "buffers="),
    "a gradient scaled in a backward": of_layer(Reversal, "couples_samples", "between", "number of samples"),
    "inputs scaled by the batch's maximum": of_loss(
        scaled_by_maximum, separate, "inputs of the model", "constants of the data set"
    ),
    "samples mixed with drawn ones": of_loss(mixed_up, separate, "inputs of the model", "constants of the data set"),
}
HELD: Mapping[str, Subject] = {
    "noise in evaluation mode": Subject(lambda: Encoder(Noise), mean(separate), vectors),
    "variational autoencoder": Subject(Variational, mean(evidence_bound), vectors),
    "diffusion": Subject(lambda: Encoder(out=NUM_FEATURES), mean(denoise), vectors),
}
"""What draws random numbers wherever it runs, and is right: it is compared with each sample's numbers held."""
