"""sentence-transformers: losses that compare the samples of a batch, exact over micro-batches and ranks.

The module uses no private names, and does not import sentence-transformers.
"""

import itertools
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from anybatch.core.geometry import checked_int
from anybatch.core.torch_internals import BufferKeeper, kept_buffers
from anybatch.core.tree import copied
from anybatch.errors import BatchSizeError, UserError
from anybatch.integrations.loops import gather_objects, reduce_gradients

Item = tuple[int, dict[str, Any]]  # the seed of a micro-batch, and its features of one column


class Joint(nn.Module):
    """A loss of sentence-transformers over the samples of all ranks, in micro-batches.

        loss = Joint(MultipleNegativesRankingLoss(model), micro_batch_size=32)
        SentenceTransformerTrainer(model, args, train_dataset=data, loss=loss).train()

    The gradient is that of one forward and backward of the samples of all ranks; only dropout draws other numbers. Set
    `per_device_train_batch_size` to the samples of a rank, without accumulation. Memory holds the graph of one
    micro-batch, and each sample runs twice. Any loss that uses only sentence embeddings is possible.

    Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021, section 3.

    Args:
        loss: a module that calls its `model` (or `sentence_embedder`) for the columns of the data.
        micro_batch_size: maximum samples of a forward and backward.
    """

    uses_gradient_cache = True  # wrapping losses ask for it: the second pass runs in the backward

    def __init__(self, loss: nn.Module, *, micro_batch_size: int) -> None:
        super().__init__()
        model, parts = getattr(loss, "model", getattr(loss, "sentence_embedder", None)), list(loss.modules())
        flags = ("uses_gradient_cache", "gather_across_devices", "guide")
        found = [name for name in flags if any(getattr(part, name, False) for part in parts)]
        if found or not isinstance(model, nn.Module):
            reason = f"it has {found[0]}" if found else "it has no attribute `model`"
            message = f"Joint cannot wrap {type(loss).__name__}: {reason}. Use the loss without Joint, or another one."
            raise UserError(message, code="unsupported_loss")
        self.model, self.loss = model, loss  # the trainer replaces `model` by DistributedDataParallel
        self.micro_batch_size = checked_int("micro_batch_size", micro_batch_size, error=BatchSizeError)
        self._places = [(part, name) for part in parts for name, child in part.named_children() if child is model]
        of_model = set(map(id, model.parameters()))
        self._own = [p for p in loss.parameters() if id(p) not in of_model and p.requires_grad]

    def forward(self, sentence_features: Iterable[Mapping[str, Any]], labels: Tensor | None = None) -> Tensor:
        """Return the loss. Its backward runs the second pass, and reduces the gradients over ranks once."""
        is_training, buffers = torch.is_grad_enabled(), kept_buffers(self.model)
        seeds = itertools.count(int(torch.randint(1 << 62, ())) if is_training else 0)
        columns = [list(zip(seeds, self._split(features), strict=False)) for features in sentence_features]
        # With a graph, which is freed immediately: without one, some models draw other random numbers.
        embedded = [[self._embed(item).detach() for item in column] for column in columns]
        if not is_training:
            return self._loss_of(list(map(torch.cat, embedded)), labels)
        gathered = [self._gathered(torch.cat(column)) for column in embedded]
        leaves = [torch.cat(parts).requires_grad_() for parts in gathered]
        value = self._loss_of(leaves, None if labels is None else torch.cat(self._gathered(labels)))
        gradients = torch.autograd.grad(value, [*leaves, *self._own], materialize_grads=True)
        pieces: list[tuple[Item, Tensor]] = []
        for column, own, parts, gradient in zip(columns, embedded, gathered, gradients, strict=False):
            mine = gradient.split(list(map(len, parts)))[dist.get_rank() if len(parts) > 1 else 0]
            # DDP averages over ranks.
            pieces += zip(column, (len(parts) * mine).split(list(map(len, own))), strict=True)
        result = value.detach().requires_grad_()
        result.register_hook(partial(self._second_pass, pieces, gradients[len(leaves) :], buffers))
        return result

    def _second_pass(
        self, pieces: list[tuple[Item, Tensor]], own: tuple[Tensor, ...], before: BufferKeeper, factor: Tensor
    ) -> None:
        """Embed each micro-batch again with the random numbers of the first pass, and run its backward."""
        after = kept_buffers(self.model)
        before.restore()
        with torch.enable_grad():
            for item, gradient in pieces:
                embeddings = self._embed(item)
                if embeddings.requires_grad:
                    embeddings.backward(gradient * factor)
            for parameter, gradient in zip(self._own, own, strict=True):
                parameter.grad = gradient * factor + (0 if parameter.grad is None else parameter.grad)
            if isinstance(self.model, DistributedDataParallel) and self.model.require_backward_grad_sync:
                reduce_gradients(self.model)
        after.restore()

    def _split(self, features: Mapping[str, Any]) -> list[dict[str, Any]]:
        # The length of a prompt may be a tensor, but not of samples.
        tensors = {key: value for key, value in features.items() if isinstance(value, Tensor) and value.dim()}
        rows = {key: value for key, value in tensors.items() if key != "prompt_length"}
        lengths = sorted(set(map(len, rows.values())))
        if len(lengths) != 1:
            message = f"Joint cannot split features whose tensors have {lengths} rows: use padded batches of texts."
            raise UserError(message, code="unequal_lengths")
        parts = (slice(start, start + self.micro_batch_size) for start in range(0, lengths[0], self.micro_batch_size))
        return [{**features, **{key: value[part] for key, value in rows.items()}} for part in parts]

    def _embed(self, item: Item) -> Tensor:
        # Not through DDP, which would reduce gradients in every backward.
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        seed, batch = item
        devices = {value.device for value in batch.values() if isinstance(value, Tensor) and value.is_cuda}
        with torch.random.fork_rng(devices=list(devices)):
            torch.manual_seed(seed)
            embeddings: Tensor = model(copied(batch))["sentence_embedding"]
        return embeddings

    def _loss_of(self, embeddings: list[Tensor], labels: Tensor | None) -> Tensor:
        """Return the loss of these embeddings, which it receives as features and as the outputs of its model."""
        models, given = [getattr(part, name) for part, name in self._places], nn.Identity()
        try:
            for part, name in self._places:
                setattr(part, name, given)
            value = self.loss([{"sentence_embedding": rows} for rows in embeddings], labels)
        finally:
            for (part, name), model in zip(self._places, models, strict=True):
                setattr(part, name, model)
        return torch.stack(list(value.values())).sum() if isinstance(value, dict) else value

    def _gathered(self, rows: Tensor) -> list[Tensor]:
        """Return the rows of each rank."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return [rows]
        if not isinstance(self.model, DistributedDataParallel):
            message = "on several ranks, Joint needs DistributedDataParallel: start the trainer without FSDP."
            raise UserError(message, code="needs_ddp")
        return [part.to(rows.device) for part in gather_objects(rows.cpu())]
