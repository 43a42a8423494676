"""`Joint`: losses across samples have the gradient of one batch, over micro-batches and ranks."""

import os
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from anybatch.core.tensors import Gradients, relative_error
from anybatch.errors import BatchSizeError, UserError
from anybatch.integrations import Joint
from anybatch.testing import run_ranks
from tests.raising import raises

BOUND = 1e-12
NUM_ROWS = 8
Features = dict[str, Any]


class Encoder(nn.Module):
    """A model whose output is a sentence embedding, with dropout masks that it records, or repeats."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Embedding(40, 8), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(1))
        self.calls: Tensor
        self.masks: list[Tensor] = []
        self.repeated: list[Tensor] = []
        self.double()

    def forward(self, features: Features) -> Features:
        """Return the features with their embeddings."""
        mask = features["attention_mask"]
        hidden = (self.layer(features["input_ids"]) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        kept = self.repeated.pop(0) if self.repeated else (torch.rand(hidden.shape) > 0.3).double()
        self.masks.append(kept)
        self.calls += 1
        features["sentence_embedding"] = self.head((hidden * kept).tanh())
        return features


class Contrastive(nn.Module):
    """In-batch negatives with a trained temperature, as losses of sentence-transformers are written."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.scale = model, nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, sentence_features: list[Features], labels: Tensor | None) -> Tensor:
        """Return the loss of finding the positive of each anchor."""
        del labels
        one, other = (F.normalize(self.model(features)["sentence_embedding"]) for features in sentence_features)
        return F.cross_entropy(self.scale * one @ other.T, torch.arange(len(one)))


class Ordered(nn.Module):
    """A loss of labels and of all pairs of samples, in a dict of terms, with another name for the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.sentence_embedder = model

    def forward(self, sentence_features: list[Features], labels: Tensor) -> dict[str, Tensor]:
        """Return a ranking loss and a regression."""
        one, other = (self.sentence_embedder(features)["sentence_embedding"] for features in sentence_features)
        scores = F.cosine_similarity(one, other)
        return {"rank": ((scores[:, None] - scores) * (labels[:, None] < labels)).logsumexp((0, 1)), "fit": one.mean()}


def data() -> tuple[list[Features], Tensor]:
    """Return two columns of padded texts, and labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 40, (2, NUM_ROWS, 6), generator=generator)
    lengths = torch.randint(1, 7, (2, NUM_ROWS, 1), generator=generator)
    mask = (torch.arange(6) < lengths).long()
    columns = [{"input_ids": a, "attention_mask": b, "task": "search"} for a, b in zip(ids, mask, strict=True)]
    return columns, torch.rand(NUM_ROWS, generator=generator, dtype=torch.float64)


def rows_of(columns: list[Features], rows: slice) -> list[Features]:
    """Return some rows of all columns."""
    return [{key: v[rows] if isinstance(v, Tensor) else v for key, v in column.items()} for column in columns]


def gradients(loss: nn.Module) -> Gradients:
    """Return the gradients of a loss and its model, without DDP in the names."""
    return {name.replace("model.module", "model"): p.grad for name, p in loss.named_parameters()}


def reference(make: Callable[[nn.Module], nn.Module], masks: list[Tensor]) -> tuple[float, Gradients]:
    """Return the loss and the gradients of one batch, with these masks of the two columns."""
    model = Encoder()
    loss, model.repeated = make(model), list(masks)
    columns, labels = data()
    value = loss(columns, labels)
    total: Tensor = torch.stack(list(value.values())).sum() if isinstance(value, dict) else value
    total.backward()
    return float(total.detach()), gradients(loss)


@pytest.mark.parametrize("make", [Contrastive, Ordered])
@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_micro_batches(make: Callable[[nn.Module], nn.Module], size: int) -> None:
    """Loss and gradients are those of one batch with the same dropout masks; the second pass draws the same masks."""
    model, (columns, labels) = Encoder(), data()
    joint = Joint(make(model), micro_batch_size=size)
    value = joint(columns, labels)
    first = list(model.masks)
    model.masks.clear()
    (3 * value).backward()
    half = len(first) // 2
    expected, of_batch = reference(make, [torch.cat(first[:half]), torch.cat(first[half:])])

    assert all(map(torch.equal, first, model.masks))
    assert len({tuple(mask.flatten().tolist()) for mask in first}) > 1
    assert float(value.detach()) == pytest.approx(expected, rel=BOUND)
    found = {name: None if grad is None else grad / 3 for name, grad in gradients(joint.loss).items()}
    assert relative_error(found, of_batch) <= BOUND
    assert float(model.calls) == len(first)


def test_evaluation_is_the_loss_alone() -> None:
    """Without gradients, the loss is computed without a second pass, and draws no numbers."""
    model, (columns, labels) = Encoder(), data()
    state = torch.get_rng_state()
    with torch.no_grad():
        value = Joint(Contrastive(model), micro_batch_size=8)(columns, labels)

    assert torch.equal(state, torch.get_rng_state())
    assert float(value.detach()) == pytest.approx(reference(Contrastive, model.masks)[0], rel=BOUND)


def errors_on_a_rank(make: Callable[[nn.Module], nn.Module], size: int, find_unused: bool) -> tuple[float, float]:
    """Return the errors of the loss and of the gradients of two accumulated batches in DDP, 5 + 3 samples per batch."""
    model, (columns, labels) = Encoder(), data()
    mine = slice(0, 5) if dist.get_rank() == 0 else slice(5, NUM_ROWS)
    joint = Joint(make(model), micro_batch_size=size)
    joint.model = DistributedDataParallel(model, find_unused_parameters=find_unused)
    if isinstance(joint.loss, Contrastive):  # as the trainer does for this name
        joint.loss.model = joint.model
    with joint.model.no_sync():
        joint(rows_of(columns, mine), labels[mine]).backward()
    value = joint(rows_of(columns, mine), labels[mine])
    value.backward()
    masks: list[list[Tensor]] = [[], []]
    dist.all_gather_object(masks, model.masks)
    total, expected = dict.fromkeys(gradients(joint.loss), torch.zeros(())), 0.0
    for batch in range(2):
        of_columns: list[list[Tensor]] = [[], []]
        for of_rank in masks:
            count = len(of_rank) // 8  # two passes over two columns, for each of two batches
            for column in range(2):
                start = (4 * batch + column) * count
                of_columns[column] += of_rank[start : start + count]
        expected, of_batch = reference(make, list(map(torch.cat, of_columns)))
        total = {name: total[name] + grad for name, grad in of_batch.items() if grad is not None}
    return abs(float(value.detach()) / expected - 1), relative_error(gradients(joint.loss), total)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(("make", "find_unused"), [(Contrastive, True), (Contrastive, False), (Ordered, True)])
def test_ranks(make: Callable[[nn.Module], nn.Module], find_unused: bool) -> None:
    """On two ranks with uneven shares, also with accumulation, the gradient is that of the samples of both ranks."""
    for size in (1, 2, 8):
        outcomes = run_ranks(2, errors_on_a_rank, make, size, find_unused)
        assert not any(outcome.error for outcome in outcomes), outcomes[0].error
        assert all(max(outcome.value) <= BOUND for outcome in outcomes), outcomes


class Cached(Contrastive):
    """A loss with a gradient cache."""

    uses_gradient_cache = True


class Gathers(Contrastive):
    """A loss that gathers embeddings."""

    gather_across_devices = True


def test_refusals() -> None:
    """Losses that run the model in another way, sizes below 1, and packed features are refused by name."""
    for loss in (Cached(Encoder()), Gathers(Encoder()), nn.MSELoss()):
        with raises(UserError, "unsupported_loss"):
            Joint(loss, micro_batch_size=2)
    with raises(BatchSizeError, "not_a_whole_number"):
        Joint(Contrastive(Encoder()), micro_batch_size=0)
    columns, _ = data()
    columns[0]["cu_seq_lens_q"] = torch.arange(NUM_ROWS + 1)
    with raises(UserError, "unequal_lengths"):
        Joint(Contrastive(Encoder()), micro_batch_size=2)(columns)


WORDS = [f"w{number}" for number in range(40)]
ROWS = [{"anchor": f"w{i} w{i + 8} w{3 * i}", "positive": f"w{i + 20} w{i + 9}"} for i in range(NUM_ROWS)]


class Projection(nn.Module):
    """A trained layer after a bag of words."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(40, 8)

    def forward(self, features: Features) -> Features:
        """Return the features with an embedding."""
        vectors = features["sentence_embedding"].to(self.linear.weight.dtype)
        return features | {"sentence_embedding": self.linear(vectors)}


def sentence_model(library: Any) -> Any:
    """Return a small model of sentence-transformers."""
    torch.manual_seed(0)
    bag = library.sentence_transformer.modules.BoW(WORDS, word_weights={})
    return library.SentenceTransformer(modules=[bag, Projection()]).double()


def trained_error(size: int, rows: int, name: str, folder: Path) -> float:
    """Return the error of the first step of a SentenceTransformerTrainer with `rows` samples per rank."""
    datasets, library = import_module("datasets"), import_module("sentence_transformers")
    options = {"num_train_epochs": 1, "max_grad_norm": 0, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # asked for, although the group exists
    warnings.simplefilter("ignore")
    losses = library.sentence_transformer.losses
    model, whole, steps = sentence_model(library), sentence_model(library), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: steps.append([p.grad.clone() for p in model.parameters()]))
    args = library.SentenceTransformerTrainingArguments(
        str(folder), per_device_train_batch_size=rows, save_strategy="no", ddp_backend="gloo", **options
    )

    def make(model: Any) -> nn.Module:
        kinds: dict[str, Callable[[Any], nn.Module]] = vars(losses)
        if name == "MatryoshkaLoss":
            return kinds[name](model, kinds["MultipleNegativesRankingLoss"](model), [8, 4])  # type: ignore[call-arg]
        return kinds[name](model)

    library.SentenceTransformerTrainer(
        model,
        args,
        datasets.Dataset.from_list(ROWS),
        loss=Joint(make(model), micro_batch_size=size),
        optimizers=(optimizer, None),
    ).train()
    columns = [whole.preprocess([row[name] for row in ROWS]) for name in ("anchor", "positive")]
    make(whole)(columns, None).backward()
    expected = [p.grad for p in whole.parameters()]
    assert len(steps) == 1
    return relative_error(dict(enumerate(steps[0])), dict(enumerate(expected)))  # type: ignore[arg-type]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("sentence_transformers") is None or find_spec("datasets") is None,
    reason="needs sentence-transformers and datasets",
)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("MultipleNegativesRankingLoss", 1),
        ("MultipleNegativesSymmetricRankingLoss", 1),
        ("MatryoshkaLoss", 1),
        ("MultipleNegativesRankingLoss", 2),
    ],
)
def test_losses_of_sentence_transformers(name: str, ranks: int, tmp_path: Path) -> None:
    """A SentenceTransformerTrainer computes the gradient of the samples of all ranks in one batch."""
    outcomes = run_ranks(ranks, trained_error, 3, NUM_ROWS // ranks, name, tmp_path)
    assert not any(outcome.error for outcome in outcomes), outcomes[0].error
    assert all(outcome.value <= BOUND for outcome in outcomes), outcomes
