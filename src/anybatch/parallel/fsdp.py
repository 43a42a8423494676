"""torch's FSDP2 (`fully_shard`), changed to sum: each rank keeps a shard of the weights, gradients and optimizer state.

Each block of the model gathers its weights before its forward and again before its backward, so ranks run in lockstep:
a rank with fewer micro-batches runs filler micro-batches, with weight 0.
"""

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, cast
from weakref import WeakSet

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
from anybatch.core.tree import Batch
from anybatch.core.units import in_bytes
from anybatch.errors import LossError, UserError, WorldError
from anybatch.parallel.agreement import StepAgreement
from anybatch.parallel.control import mesh_of_ranks
from anybatch.parallel.dtensors import SHARDED
from anybatch.parallel.gradient_buckets import OwnedGradients
from anybatch.parallel.local_parts import local_part
from anybatch.parallel.replicas import Initial, align_replicas, already_sharded
from anybatch.parallel.sharding import (
    AllGather,
    BackwardInLoss,
    ReduceScatter,
    Sharding,
    ShardingGroup,
    ShardWatch,
    refuse_gradient_of,
    refuse_other_sharding,
    refuse_unshardable,
    shard,
    sharding_groups,
    whole_parameters,
)
from anybatch.parallel.strategy import Capabilities, LossCaller, Prepared, ReductionObserver, Turn, trainable, weakly
from anybatch.parallel.torch_internals import (
    ShardedGroup,
    begin_as_root,
    carry_over,
    root_of,
    sharded_group,
)
from anybatch.parallel.world import World

Reduction = Literal["auto", "every_micro_batch", "replicas_last", "last_micro_batch"]
"""When gradients are reduced; see `FSDP`."""

_REDUCTIONS = ("auto", "every_micro_batch", "replicas_last", "last_micro_batch")
_MOST_OF_MEMORY = 0.1
_GRADIENT_IN_LOSS = (
    "the loss function computes a gradient (torch.autograd.grad, as for a gradient penalty) under strategy 'fsdp', "
    "whose backward frees the gathered weights that the engine's own backward needs. Use strategy='zero1', which "
    "shards the optimizer's state, or 'all_reduce'."
)
_NUM_WATCHED = 2
"""Number of first steps, and of first calls of each function in them, that are watched."""
_PREPARED: "WeakSet[FSDP]" = WeakSet()
"""Strategies whose models are in use: a loss may run another engine's model, as in a GAN."""
_NOTHING = nullcontext()


class FSDP:
    """Shards each repeated block of a model over the ranks separately, and then the rest of it.

    The plain loop: `fully_shard` on each block and on the model, every module set to sum, reduction in the chosen
    micro-batches, and an optimizer over the shards. A model that is sharded already keeps its shards, and is set to
    sum.

    Args:
        sharding: form of weights, gradients and shards; None for the defaults of `Sharding`.
        replicas: hybrid sharding: the model is sharded over `world size / replicas` consecutive ranks, such as the
            ranks of a host, and each such group holds a replica.
        reduction: "every_micro_batch" needs the least memory, and reduces once per micro-batch. "replicas_last", for
            several replicas, reduces over shards in every micro-batch and over replicas in the last one only.
            "last_micro_batch" reduces once per step, and keeps whole gradients in memory until then. "auto" is
            "last_micro_batch" if whole gradients take at most a tenth of the accelerator's memory, otherwise one of the
            first two.
        initial: "broadcast" makes ranks equal with rank 0's values before sharding; "verify" raises if they differ.
    """

    capabilities = Capabilities(
        name="fsdp",
        feature=Feature.FSDP,
        lockstep=True,
        replaces_parameters=True,
        float32_accumulation=False,
        moves_modules=True,
        tensor_parallel=True,
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
        self._whole: list[int] = []
        self._used: list[bool] = []
        self._hooks: list[Any] = []
        self._reduces: bool | None = None
        self._begun = False
        self._others: list[FSDP] = []
        self._names: dict[int, str] = {}
        self._nodes: list[Any] = []
        self._steps_to_watch = _NUM_WATCHED
        self._num_calls = Counter[object]()
        self._owned = OwnedGradients()
        self._backward_in_loss = BackwardInLoss()

    def prepare(
        self, modules: nn.Module, model: object, world: World, on_reduction: ReductionObserver | None
    ) -> Prepared:
        """Shard the model, unless it is sharded already, and set all of it to sum; refuse what cannot be sharded."""
        _refuse_gloo_on_gpus(world)
        gc.collect()  # torch keeps a dropped sharded model in reference cycles, with its memory
        self._world, self._model, self._reduces = world, model, None
        differed: tuple[str, ...] = ()
        form = "as the user sharded it"
        for module in _sharded_modules(modules):
            module.reshard()  # its own forward may have left it gathered
        if not already_sharded(modules):
            refuse_unshardable(modules)
            groups = sharding_groups(modules)
            mesh = self._mesh()
            differed = align_replicas(modules, world, self._initial)
            shard(groups, mesh, self._sharding)
            form = f"{_in_words(groups)}, over {world.size // self._replicas} ranks"
            for parameter in whole_parameters(modules):
                parameter.data = parameter.data.to(world.device)
        else:
            refuse_other_sharding(modules, world)
            form += f", by fully_shard over {world.size} ranks"
        self._root = _rooted(modules, model)
        self._modules = _sharded_modules(self._root)
        self._outermost = _outermost(modules)
        self._begin(is_begun=False)
        for module in self._modules:
            # Each module separately: a setting on the root only affects the root's own parameters.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)
            # Ranks may use different parameters; see `ShardedGroup.reduce_unused` for versions before 2.13.
            if hasattr(module, "set_reduce_scatter_unused_params"):
                module.set_reduce_scatter_unused_params(reduce_scatter_unused_params=True)
        parameters = trainable(modules)
        self._parameters = list(parameters.values())
        self._watch(weakly(on_reduction), list(parameters))
        self._hooks += [
            cast("nn.Module", module).register_forward_hook(self._backward_in_loss.mark)
            for module in self._modules
            if not isinstance(module, LossCaller)
        ]
        _PREPARED.add(self)
        self._owned = OwnedGradients(self._gathered_leaves())
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
        # A reducing backward that is not marked as the last would keep its last buffer into the next forward.
        self._modules[0].set_is_last_backward(reduces)
        if not self._begun:
            self._begin(is_begun=True)
        if turn.backward_only:
            self._gather()  # the backward in between has freed the gathered weights
        return _NOTHING if turn.last else self._owned

    def finish_gradients(
        self, numbers: Float[Tensor, " numbers"]
    ) -> tuple[list[torch.Tensor | None], Float[Tensor, " numbers"]]:
        """Return the reduced shards, and sum the gradients of parameters that are not sharded."""
        self._steps_to_watch -= bool(self._steps_to_watch)
        for place in self._whole:
            self._used[place] = self._parameters[place].grad is not None
        agreement = StepAgreement(numbers, self._used, self._world)
        # Every rank sends these in the data group, before the agreement's numbers.
        whole = self._start_whole()
        agreement.start()
        # Before the agreement, which raises if ranks differ: no collective may be pending then.
        self._finish_whole(*whole)
        numbers, used = agreement.wait()
        self._begin(is_begun=False)
        for parameter, is_used in zip(self._parameters, used, strict=True):
            # FSDP2 reduces zeros for parameters that this rank has not used; if no rank has used it, it has no
            # gradient.
            if not is_used:
                parameter.grad = None
        return [parameter.grad for parameter in self._parameters], numbers

    def place_gradients(self) -> None:
        """Start without any gradient."""
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Drop the shards' gradients, and whole ones left by a failed step."""
        for parameter in self._parameters:
            parameter.grad = None
        self._used[:] = [False] * len(self._used)
        self._owned.pending = self._owned.parameters
        if self._begun:
            self._begin(is_begun=False)
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
        """All-reduce a small tensor in the data group."""
        dist.all_reduce(numbers, group=self._world.group)
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
        gathered = {id(shard): whole for shard, whole in pairs}
        return [gathered.get(id(parameter), parameter) for parameter in self._parameters]

    def _mesh(self) -> DeviceMesh:
        if (mesh := self._world.mesh) is not None:
            if self._replicas > 1:
                message = (
                    f"replicas={self._replicas} creates a mesh over all ranks, but this world is a mesh dimension. "
                    "Shard the model with fully_shard over two dimensions of your mesh before the engine is made."
                )
                raise WorldError(message)
            return mesh
        size, kind = self._world.size, self._world.device.type
        if size % self._replicas:
            message = (
                f"replicas={self._replicas} does not divide the {size} ranks: each replica is sharded over equally "
                "many. Use a divisor, such as the number of hosts."
            )
            raise WorldError(message)
        if self._replicas == 1:
            return mesh_of_ranks(kind, (size,), ("shard",))
        return mesh_of_ranks(kind, (self._replicas, size // self._replicas), ("replicate", "shard"))

    def _begin(self, *, is_begun: bool) -> None:
        """Begin or end the micro-batches of an effective batch."""
        self._begun = is_begun
        if is_begun:
            self._others = [other for other in _PREPARED if other is not self and not other.holds_gradients]
        else:
            for other in self._others:  # a backward accumulates in all weights that it reaches
                other.clear_gradients()
            self._others = []
        for module in self._outermost:
            # Within an effective batch, weights gathered for a forward are needed again when its backward begins.
            # Outside, a backward may never come, and gathered weights would become stale.
            module.set_reshard_after_forward(not is_begun, recurse=False)

    def _call(self, function: LossFunction, batch: Batch) -> Any:  # noqa: ANN401 (the loss's result)
        try:
            if isinstance(self._root, LossCaller):
                return self._root(partial(self._gathered, function, batch))
            return function(self._model, batch)
        finally:
            if not self._begun:
                for module in self._outermost:
                    module.reshard()

    def _gathered(self, function: LossFunction, batch: Batch, model: object) -> Any:  # noqa: ANN401 (the same)
        # Gather the parameters outside of blocks here and not in the model's own forward, which `model.encode` skips.
        self._gather()
        self._backward_in_loss.begin()
        try:
            with self._watched(function) if self._begun and self._steps_to_watch else _NOTHING:
                return function(model, batch)
        finally:
            # Not in an evaluation, where no backward needs the weights.
            if self._backward_in_loss.ended() and self._begun:
                raise LossError(_GRADIENT_IN_LOSS)

    def _gather(self) -> None:
        for module in self._outermost:
            module.unshard()

    def _watched(self, function: LossFunction) -> AbstractContextManager[object]:
        """Return the context that watches the first calls of each function."""
        code = getattr(function, "__code__", type(function))
        self._num_calls[code] += 1
        return ShardWatch(self._names) if self._num_calls[code] <= _NUM_WATCHED else _NOTHING

    def _watch(self, on_reduction: Callable[[], ReductionObserver | None], names: Sequence[str]) -> None:
        """Watch which parameters backwards reach, and report reductions.

        `on_reduction` is a function () -> the observer, or None; `names` are the trainable parameters by shard.
        """
        places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        self._used = [False] * len(self._parameters)
        self._groups = []
        for number, module in enumerate(self._modules):
            group = sharded_group(cast("nn.Module", module))
            if group is None:
                continue
            self._groups.append(group)
            for one in group.shards:
                if id(one) in places:
                    name = self._names[id(one)] = names[places[id(one)]]
                    # Not a hook on the shard, which FSDP2 or the engine would trigger.
                    node = get_gradient_edge(one).node
                    self._hooks.append(node.register_prehook(refuse_gradient_of(name)))
                    self._nodes.append(node)  # otherwise garbage-collected
            if not hasattr(module, "set_reduce_scatter_unused_params"):
                group.reduce_unused()
            # Gathering creates the parameters that a backward sees; all ranks gather the same ones in the same order.
            module.unshard()
            module.reshard()
            for one, whole in zip(group.shards, group.gathered, strict=True):
                carry_over(one, whole, hooks=False)
            # Not a method: torch would keep this strategy alive, and with it the process group of a dropped world.
            note = partial(_note_use, self._used, [places.get(id(shard), -1) for shard in group.shards])
            self._hooks += group.on_whole_gradient(note)
            self._replace_collectives(module, on_reduction, number)
        sharded = {id(shard) for group in self._groups for shard in group.shards}
        self._whole = [place for key, place in places.items() if key not in sharded]

    def _replace_collectives(
        self, module: FSDPModule, on_reduction: Callable[[], ReductionObserver | None], number: int
    ) -> None:
        # On an accelerator torch's collectives are replaced only to report reductions to an observer.
        roll_call = self._world.roll_call if self._world.device.type == "cpu" else None
        all_gather: Any = AllGather(roll_call)  # torch's base classes are private
        reduce_scatter: Any = ReduceScatter(roll_call, on_reduction, number)
        if roll_call is not None:
            module.set_custom_all_gather(all_gather)
        if roll_call is not None or on_reduction() is not None:
            module.set_custom_reduce_scatter(reduce_scatter)

    def _start_whole(self) -> tuple[list[torch.Tensor], dist.Work | None]:
        """Start summing the gradients of parameters that are not sharded, as one message."""
        parameters = [self._parameters[place] for place in self._whole]
        if not parameters:
            return [], None
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        with self._world.collective():
            work = dist.all_reduce(flat, group=self._world.group, async_op=True)
        return [flat, *gradients], work

    def _finish_whole(self, tensors: list[torch.Tensor], work: dist.Work | None) -> None:
        if work is None:
            return
        self._world.wait(work)
        flat, *gradients = tensors
        parts = flat.split([gradient.numel() for gradient in gradients])
        for place, gradient, part in zip(self._whole, gradients, parts, strict=True):
            self._parameters[place].grad = part.view_as(gradient).to(gradient.dtype)

    def _chosen_reduction(self) -> tuple[Reduction, str]:
        """Return the reduction mode, and the reason for it, as a clause."""
        dtype = self._sharding.sum_dtype
        whole_bytes = sum(p.numel() * (p.element_size() if dtype is None else dtype.itemsize) for p in self._parameters)
        costs = f"whole gradients take {in_bytes(whole_bytes)} on each rank"
        if self._reduction != "auto":
            return self._reduction, f"{self._reduction}, as named; {costs}"
        memory = self._world.device_bytes
        if memory is None or whole_bytes <= _MOST_OF_MEMORY * memory:
            return "last_micro_batch", f"last_micro_batch, once per step: {costs}"
        reduction: Reduction = "every_micro_batch" if self._replicas == 1 else "replicas_last"
        return reduction, f"{reduction}: {costs}, more than {_MOST_OF_MEMORY:.0%} of {in_bytes(memory)}"


def _in_words(groups: Sequence[ShardingGroup]) -> str:
    num_blocks = sum(not group.outermost for group in groups)
    if num_blocks:
        return f"{num_blocks} blocks, one by one, and what is outside of them"
    return "the model in one piece, because it has no repeated blocks: a step gathers all weights together"


def _note_use(used: list[bool], places: Sequence[int], number: int) -> None:
    used[places[number]] = True


def _rooted(modules: nn.Module, model: object) -> nn.Module:
    """Return the root of all sharded modules: a `LossCaller`, unless the model has already run under its own root."""
    first = next(module for module in modules.modules() if isinstance(module, FSDPModule))
    root = root_of(first)
    if root is None:
        root = LossCaller(modules, model)
        groups = [sharded_group(cast("nn.Module", module)) for module in _sharded_modules(modules)]
        mesh = next(group.mesh for group in groups if group is not None)
        fully_shard(root, mesh=mesh, ignored_params={p for p in modules.parameters() if not isinstance(p, DTensor)})
        begin_as_root(root)
    return root


def _sharded_modules(modules: nn.Module) -> list[FSDPModule]:
    found: list[Any] = [module for module in modules.modules() if isinstance(module, FSDPModule)]
    return found


def _outermost(modules: nn.Module) -> list[FSDPModule]:
    """Return the sharded modules that are not inside another sharded module."""
    if isinstance(modules, FSDPModule):
        return [modules]
    return [found for child in modules.children() for found in _outermost(child)]


def _reset_forward(root: nn.Module) -> None:
    """Free the weights gathered by a forward whose backward failed or never ran."""
    if hasattr(root, "reset_iter_state"):  # since torch 2.13
        cast("Any", root).reset_iter_state()
        return
    for module in _sharded_modules(root):
        module.reshard()


def _refuse_gloo_on_gpus(world: World) -> None:
    """Raise a `WorldError` for GPUs whose collectives run over gloo, where FSDP2 segfaults (seen with torch 2.11)."""
    if world.device.type != "cuda" or not world.connected or "nccl" in dist.get_backend_config(world.group):
        return
    message = (
        f"strategy='fsdp' on {world.device} needs NCCL, and these {world.size} ranks communicate over gloo, because "
        f"they share {torch.cuda.device_count()} GPUs. Start one rank per GPU, or use strategy='all_reduce'."
    )
    raise WorldError(message)
