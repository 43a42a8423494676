"""Strategy "fsdp": torch's FSDP2 with summed gradients. Ranks hold shards of weights, gradients and states.

Each block of the model gathers its weights before its forward and again before its backward, so ranks run in lockstep:
a rank with fewer micro-batches than others runs filler micro-batches, whose loss has weight 0.
"""

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, cast
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from anybatch.core.compatibility import Feature
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.tree import Batch, tensors_of
from anybatch.core.units import in_bytes
from anybatch.errors import LossError, UserError, WorldError
from anybatch.parallel.agreement import StepAgreement
from anybatch.parallel.control import mesh_of_ranks
from anybatch.parallel.dtensors import SHARDED, local_part
from anybatch.parallel.gradient_buckets import FirstGradientCopies
from anybatch.parallel.replicas import Initial, align_replicas, already_sharded
from anybatch.parallel.sharding import (
    AllGather,
    BackwardInLoss,
    ReduceScatter,
    Sharding,
    ShardingGroup,
    check_shardable,
    check_sharding,
    gradient_check_of,
    raise_shard_used,
    shard,
    sharded_modules,
    sharding_groups,
    whole_parameters,
)
from anybatch.parallel.strategy import Capabilities, LossCaller, Prepared, ReductionNotifier, Turn, trainable
from anybatch.parallel.torch_internals import (
    ShardedGroup,
    begin_as_root,
    copy_attributes,
    root_of,
    sharded_group,
)
from anybatch.parallel.world import World

Reduction = Literal["auto", "every_micro_batch", "replicas_last", "last_micro_batch"]
"""When gradients are reduced; see `FSDP`."""

_REDUCTIONS = ("auto", "every_micro_batch", "replicas_last", "last_micro_batch")
_MAX_SHARE_OF_MEMORY = 0.1
_GRADIENT_IN_LOSS = (
    "the loss function computes a gradient (torch.autograd.grad, as for a gradient penalty) under strategy 'fsdp', "
    "whose backward frees the gathered weights that the engine's own backward needs. Use strategy='zero1', which "
    "shards the optimizer's state, or 'all_reduce'."
)
_PREPARED: "WeakSet[FSDP]" = WeakSet()
"""Strategies whose models are in use: a loss may run another engine's model, as in a GAN."""
_NULL_CONTEXT = nullcontext()


class FSDP:
    """Shards each repeated block of a model over the ranks separately, and then all other parameters.

    In plain PyTorch: `fully_shard` on each block and on the model, every module set to sum, reduction in the chosen
    micro-batches, and an optimizer over the shards. An already sharded model keeps its shards, and is set to sum.

    Args:
        sharding: dtypes and memory of weights, gradients and shards; None for the defaults of `Sharding`.
        replicas: hybrid sharding: the model is sharded over `world size / replicas` consecutive ranks, such as the
            ranks of a host, and each such group holds a replica.
        reduction: "every_micro_batch" needs the least memory, and reduces once per micro-batch. "replicas_last", for
            several replicas, reduces over shards in every micro-batch and over replicas in the last micro-batch only.
            "last_micro_batch" reduces once per step, and keeps whole gradients in memory until then. "auto" is
            "last_micro_batch" if whole gradients take at most a tenth of the accelerator's memory; otherwise
            "replicas_last" with several replicas, or "every_micro_batch".
        initial: "broadcast" makes ranks equal with rank 0's values before sharding; "verify" raises if they differ.
    """

    capabilities = Capabilities(
        name="fsdp",
        feature=Feature.FSDP,
        lockstep=True,
        replaces_parameters=True,
        float32_accumulation=False,
        moves_modules=True,
    )

    def __init__(
        self,
        sharding: Sharding | None = None,
        *,
        replicas: int = 1,
        reduction: Reduction = "auto",
        initial: Initial = "broadcast",
    ) -> None:
        if reduction not in _REDUCTIONS:
            message = f"{reduction=} must be one of {', '.join(map(repr, _REDUCTIONS))}."
            raise UserError(message)
        if reduction == "replicas_last" and replicas == 1:
            message = f"{reduction=} needs several replicas, but {replicas=}. Use reduction='every_micro_batch'."
            raise UserError(message)
        self._sharding = sharding or Sharding()
        self._replicas = replicas
        self._reduction: Reduction = reduction
        self._initial: Initial = initial
        self._world = World()
        self._root: nn.Module | None = None
        self._model: object = None
        self._outermost: list[FSDPModule] = []
        self._modules: list[FSDPModule] = []
        self._groups: list[ShardedGroup] = []
        self._parameters: list[nn.Parameter] = []
        self._unsharded: list[int] = []
        self._used: list[bool] = []
        self._hooks: list[Any] = []
        self._reduces: bool | None = None
        self._is_active = False
        self._other_strategies: list[FSDP] = []
        self._nodes: list[Any] = []
        self._first_copies = FirstGradientCopies()
        self._backward_in_loss = BackwardInLoss()

    def prepare(self, modules: nn.Module, model: object, world: World, notifier: ReductionNotifier) -> Prepared:
        """Shard the model, unless it is sharded already, and set it to sum gradients; refuse unsupported models."""
        _check_backend(world)
        gc.collect()  # torch keeps a dropped sharded model in reference cycles, with its memory
        self._world, self._model, self._reduces = world, model, None
        differed: tuple[str, ...] = ()
        form = "as the user sharded it"
        for module in sharded_modules(modules):
            module.reshard()  # a forward may have left its weights gathered
        if not already_sharded(modules):
            check_shardable(modules)
            groups = sharding_groups(modules)
            mesh = self._mesh()
            differed = align_replicas(modules, world, self._initial)
            shard(groups, mesh, self._sharding)
            form = f"{_describe(groups)}, over {world.size // self._replicas} ranks"
            for parameter in whole_parameters(modules):
                parameter.data = parameter.data.to(world.device)
        else:
            check_sharding(modules, world)
            form += f", by fully_shard over {world.size} ranks"
        self._root = _root_of(modules, model)
        self._modules = sharded_modules(self._root)
        self._outermost = _outermost(modules)
        self._set_active(is_active=False)
        for module in self._modules:
            # Each module separately: a setting on the root only affects the root's own parameters.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)
            # Ranks may use different parameters; see `ShardedGroup.reduce_unused` for versions before 2.13.
            if hasattr(module, "set_reduce_scatter_unused_params"):
                module.set_reduce_scatter_unused_params(reduce_scatter_unused_params=True)
        parameters = trainable(modules)
        self._parameters = list(parameters.values())
        # Weak, since torch keeps its arguments alive, and would keep a dropped engine alive.
        self._add_hooks(ref(notifier), list(parameters))
        self._hooks += [
            cast("nn.Module", module).register_forward_hook(self._backward_in_loss.mark)
            for module in self._modules
            if not isinstance(module, LossCaller)
        ]
        _PREPARED.add(self)
        self._first_copies = FirstGradientCopies(self._gathered_leaves())
        if self._groups and self._groups[0].mesh.ndim > 1:  # an already sharded model may have replicas
            self._replicas = self._groups[0].mesh.shape[0]
        self._reduction, reason = self._chosen_reduction()
        return Prepared(
            parameters=parameters,
            call=self._call,
            differed=differed,
            gradient_leaves=self._gathered_leaves,
            layout=SHARDED,
            decisions={"sharding": form, "reduction": reason},
        )

    def micro_batch(self, turn: Turn) -> AbstractContextManager[object]:
        """Set whether gradients of this backward are reduced, or only accumulate."""
        reduces = turn.last or self._reduction != "last_micro_batch"
        if reduces != self._reduces:
            self._reduces = reduces
            for module in self._modules:
                module.set_requires_gradient_sync(reduces, recurse=False)
        if self._reduction == "replicas_last":
            for module in self._modules:
                module.set_requires_all_reduce(turn.last, recurse=False)
        # A reducing backward that is not marked as the last would keep its last buffer until the next forward.
        self._modules[0].set_is_last_backward(reduces)
        if not self._is_active:
            self._set_active(is_active=True)
        if turn.backward_only:
            self._gather()  # a backward since the forward has freed the gathered weights
        return _NULL_CONTEXT if turn.last else self._first_copies

    def finish_gradients(
        self, report_sums: Float[Tensor, " sums"]
    ) -> tuple[list[torch.Tensor | None], Float[Tensor, " sums"]]:
        """Return the reduced shards, and sum the gradients of parameters that are not sharded."""
        for index in self._unsharded:
            self._used[index] = self._parameters[index].grad is not None
        agreement = StepAgreement(report_sums, self._used, self._world)
        # Start these before the sums of the report on every rank: the default group needs the same order on all ranks.
        unsharded = self._start_unsharded()
        agreement.start()
        # Finish these before `wait`, which raises if ranks differ: no collective may be pending then.
        self._finish_unsharded(*unsharded)
        report_sums, used = agreement.wait()
        self._set_active(is_active=False)
        for parameter, is_used in zip(self._parameters, used, strict=True):
            # FSDP2 gives zeros to parameters that no rank has used; an optimizer must see None for them.
            if not is_used:
                parameter.grad = None
        return [parameter.grad for parameter in self._parameters], report_sums

    def place_gradients(self) -> None:
        """Set every `.grad` to None."""
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Drop the gradients of shards, and unreduced gradients that a failed step has left."""
        for parameter in self._parameters:
            parameter.grad = None
        self._used[:] = [False] * len(self._used)
        self._first_copies.pending = self._first_copies.parameters
        if self._is_active:
            self._set_active(is_active=False)
            assert self._root is not None, "prepare comes first"
            _reset_forward(self._root)
            for group in self._groups:
                group.drop_whole_gradients()

    @property
    def holds_gradients(self) -> bool:
        """Whether a parameter has a gradient; FSDP2 gives zeros to parameters that a backward has not used."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        return any(bool(local_part(gradient).any()) for gradient in gradients)

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """All-reduce a small tensor in the default group."""
        dist.all_reduce(numbers)
        return numbers

    def close(self) -> None:
        """Remove the hooks. The model stays sharded, and usable while its ranks are connected."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._nodes.clear()
        _PREPARED.discard(self)

    def _gathered_leaves(self) -> list[torch.Tensor]:
        """Return the leaves that receive gradients: gathered parameters instead of their shards."""
        pairs = [pair for group in self._groups for pair in zip(group.shards, group.gathered, strict=True)]
        gathered = {id(shard): leaf for shard, leaf in pairs}
        return [gathered.get(id(parameter), parameter) for parameter in self._parameters]

    def _mesh(self) -> DeviceMesh:
        size, kind = self._world.size, self._world.device.type
        if size % self._replicas:
            message = (
                f"replicas={self._replicas} must divide the number of ranks, {size}, because all replicas have equally "
                "many ranks. Use a divisor, such as the number of hosts."
            )
            raise WorldError(message)
        if self._replicas == 1:
            return mesh_of_ranks(kind, (size,), ("shard",))
        return mesh_of_ranks(kind, (self._replicas, size // self._replicas), ("replicate", "shard"))

    def _set_active(self, *, is_active: bool) -> None:
        """Begin or end the micro-batches of an effective batch."""
        self._is_active = is_active
        if is_active:
            self._other_strategies = [other for other in _PREPARED if other is not self and not other.holds_gradients]
        else:
            for other in self._other_strategies:  # a backward accumulates in all weights that it reaches
                other.clear_gradients()
            self._other_strategies = []
        for module in self._outermost:
            # Within an effective batch, weights gathered for a forward are needed again when its backward begins.
            # Otherwise a backward may never run, and gathered weights would become stale.
            module.set_reshard_after_forward(not is_active, recurse=False)

    def _call(self, function: LossFunction, batch: Batch) -> Any:  # noqa: ANN401 (the loss's result)
        try:
            if isinstance(self._root, LossCaller):
                return self._root(partial(self._call_gathered, function, batch))
            return function(self._model, batch)
        finally:
            if not self._is_active:
                for module in self._outermost:
                    module.reshard()

    def _call_gathered(self, function: LossFunction, batch: Batch, model: object) -> Any:  # noqa: ANN401 (the same)
        # Gather the parameters outside of blocks here and not in the model's own forward, which `model.encode` skips.
        self._gather()
        self._backward_in_loss.begin()
        try:
            result = function(model, batch)
        except RuntimeError as error:
            # Weights of a block, outside of the block: "aten.mul.Tensor got mixed torch.Tensor and DTensor".
            if "torch.Tensor and DTensor" in str(error):
                raise_shard_used("a weight of a block", error)
            raise
        else:
            # Torch would add a scalar, such as a sum over weights, to the other terms of the loss, and only then fail.
            if any(isinstance(tensor, DTensor) for tensor in tensors_of(result)):
                raise_shard_used("a weight of a block")
            return result
        finally:
            # Not in an evaluation, where no backward needs the weights.
            if self._backward_in_loss.ended() and self._is_active:
                raise LossError(_GRADIENT_IN_LOSS)

    def _gather(self) -> None:
        for module in self._outermost:
            module.unshard()

    def _add_hooks(self, notifier: "ref[ReductionNotifier]", names: Sequence[str]) -> None:
        """Record which parameters backwards reach, and report reductions to observers."""
        indices = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._used = [False] * len(self._parameters)
        self._groups = []
        for number, module in enumerate(self._modules):
            group = sharded_group(module)
            if group is None:
                continue
            self._groups.append(group)
            for parameter in group.shards:
                if id(parameter) in indices:
                    name = names[indices[id(parameter)]]
                    # Not a hook on the shard, which FSDP2 or the engine would trigger.
                    node = get_gradient_edge(parameter).node
                    self._hooks.append(node.register_prehook(gradient_check_of(name)))
                    self._nodes.append(node)  # otherwise garbage-collected
            if not hasattr(module, "set_reduce_scatter_unused_params"):
                group.reduce_unused()
            # Gathering creates the leaves of the autograd graph; all ranks gather the same modules in the same order.
            module.unshard()
            module.reshard()
            for parameter, gathered in zip(group.shards, group.gathered, strict=True):
                copy_attributes(parameter, gathered, hooks=False)
            # Not a method: torch would keep this strategy alive, and with it the process group of a dropped world.
            mark = partial(_mark_used, self._used, [indices.get(id(parameter), -1) for parameter in group.shards])
            self._hooks += group.on_whole_gradient(mark)
            self._replace_collectives(module, notifier, number)
        sharded = {id(shard) for group in self._groups for shard in group.shards}
        self._unsharded = [index for key, index in indices.items() if key not in sharded]

    def _replace_collectives(self, module: FSDPModule, notifier: "ref[ReductionNotifier]", number: int) -> None:
        # On an accelerator, only to report reductions to observers.
        call_tracker = self._world.call_tracker if self._world.device.type == "cpu" else None
        all_gather: Any = AllGather(call_tracker)  # torch's base classes are private
        reduce_scatter: Any = ReduceScatter(call_tracker, notifier, number)
        if call_tracker is not None:
            module.set_custom_all_gather(all_gather)
        module.set_custom_reduce_scatter(reduce_scatter)

    def _start_unsharded(self) -> tuple[list[torch.Tensor], dist.Work | None]:
        """Start summing the gradients of parameters that are not sharded, as one message."""
        parameters = [self._parameters[index] for index in self._unsharded]
        if not parameters:
            return [], None
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        with self._world.collective():
            work = dist.all_reduce(flat, async_op=True)
        return [flat, *gradients], work

    def _finish_unsharded(self, tensors: list[torch.Tensor], work: dist.Work | None) -> None:
        if work is None:
            return
        self._world.wait(work)
        flat, *gradients = tensors
        parts = flat.split([gradient.numel() for gradient in gradients])
        for index, gradient, part in zip(self._unsharded, gradients, parts, strict=True):
            self._parameters[index].grad = part.view_as(gradient).to(gradient.dtype)

    def _chosen_reduction(self) -> tuple[Reduction, str]:
        """Return when gradients are reduced, and the reason as a clause."""
        dtype = self._sharding.sum_dtype
        whole_bytes = sum(p.numel() * (p.element_size() if dtype is None else dtype.itemsize) for p in self._parameters)
        costs = f"whole gradients take {in_bytes(whole_bytes)} on each rank"
        if self._reduction != "auto":
            return self._reduction, f"{self._reduction}, as requested; {costs}"
        memory = self._world.device_bytes
        if memory is None or whole_bytes <= _MAX_SHARE_OF_MEMORY * memory:
            return "last_micro_batch", f"last_micro_batch, once per step: {costs}"
        reduction: Reduction = "every_micro_batch" if self._replicas == 1 else "replicas_last"
        return reduction, f"{reduction}: {costs}, more than {_MAX_SHARE_OF_MEMORY:.0%} of {in_bytes(memory)}"


def _describe(groups: Sequence[ShardingGroup]) -> str:
    num_blocks = sum(not group.outermost for group in groups)
    if num_blocks:
        return f"{num_blocks} blocks, each separately, and all other parameters"
    return "the model in one piece, because it has no repeated blocks: a step gathers all weights together"


def _mark_used(used: list[bool], indices: Sequence[int], number: int) -> None:
    used[indices[number]] = True


def _root_of(modules: nn.Module, model: object) -> nn.Module:
    """Return the root of all sharded modules: a `LossCaller`, unless the model has already run under its own root."""
    root = root_of(cast("nn.Module", sharded_modules(modules)[0]))
    if root is None:
        root = LossCaller(modules, model)
        groups = [sharded_group(module) for module in sharded_modules(modules)]
        mesh = next(group.mesh for group in groups if group is not None)
        fully_shard(root, mesh=mesh, ignored_params={p for p in modules.parameters() if not isinstance(p, DTensor)})
        begin_as_root(root)
    return root


def _outermost(modules: nn.Module) -> list[FSDPModule]:
    """Return the sharded modules that are not inside another sharded module."""
    if isinstance(modules, FSDPModule):
        return [modules]
    return [module for child in modules.children() for module in _outermost(child)]


def _reset_forward(root: nn.Module) -> None:
    """Free the weights gathered by a forward whose backward failed or never ran."""
    if hasattr(root, "reset_iter_state"):  # since torch 2.13
        cast("Any", root).reset_iter_state()
        return
    for module in sharded_modules(root):
        module.reshard()


def _check_backend(world: World) -> None:
    """Raise a `WorldError` for GPUs whose collectives run over gloo, where FSDP2 segfaults (seen with torch 2.11)."""
    if world.device.type != "cuda" or not world.connected or "nccl" in dist.get_backend_config():
        return
    message = (
        f"strategy='fsdp' on {world.device} needs NCCL, and these {world.size} ranks communicate over gloo, because "
        f"they share {torch.cuda.device_count()} GPUs. Start one rank per GPU, or use strategy='all_reduce'."
    )
    raise WorldError(message)
