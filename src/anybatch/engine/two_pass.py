"""Losses across samples: two passes, with the loss of the whole effective batch between them."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from anybatch.core.loss import Loss, TermFactors, without_graph
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.splitting import BatchPlan, Cut, plan_batch
from anybatch.core.tensors import BufferValues
from anybatch.core.tree import Batch, copied, flatten_batch
from anybatch.data.random_state import HostDraws
from anybatch.engine.accumulate import LoopContext, MicroBatch, Sums
from anybatch.engine.batch_norm import BatchNormRunner
from anybatch.engine.micro_batches import CountedBatch
from anybatch.engine.notifier import Notifier
from anybatch.engine.user_code import trial_run
from anybatch.errors import CannotRedoError, LossError
from anybatch.parallel.agreement import (
    RowLayout,
    StepAbortedError,
    StepFailedError,
    StepsDifferError,
    gather_rows,
    make_gather_buffers,
)
from anybatch.parallel.strategy import Abort, Turn
from anybatch.parallel.world import World

CollectiveContext = Callable[[int], AbstractContextManager[object]]
"""Function (bytes sent by this rank) -> context of the collective that gathers outputs."""

Record = Callable[[MicroBatch], AbstractContextManager[object]]
"""Context of the forward that updates running statistics; only in the first pass."""

_NOT_LAST = Turn(first=False, last=False)
# Sent instead of outputs by a rank that leaves the step.
_OUT_OF_MEMORY, _FAILED = "out of memory", "failed"


def _not_recorded(micro_batch: MicroBatch) -> AbstractContextManager[object]:
    del micro_batch
    return nullcontext()


@dataclass(slots=True)
class Outputs:
    """Outputs of this rank's micro-batches."""

    pieces: list[list[torch.Tensor]] = field(default_factory=list)
    kinds: tuple[RowLayout, ...] | None = None
    differentiable: tuple[bool, ...] = ()
    rebuild: Callable[[Iterable[torch.Tensor]], Batch] | None = None
    graph: list[torch.Tensor] = field(default_factory=list)
    host_draws: list[HostDraws | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputExchange:
    """How to gather the outputs of the whole effective batch."""

    gather: Callable[[Outputs], tuple[list[torch.Tensor], tuple[bool, ...]]]
    plan: BatchPlan
    reports_loss: bool
    seed: int


@dataclass(frozen=True, slots=True)
class LossGradient:
    """The loss of the whole effective batch, and the gradients that start the second pass."""

    value: torch.Tensor
    of_outputs: tuple[torch.Tensor | None, ...]
    parameters: tuple[torch.Tensor, ...]
    of_parameters: tuple[torch.Tensor, ...]


def accumulate_in_two_passes(
    context: LoopContext,
    modules: nn.Module,
    micro_batches: Iterable[tuple[MicroBatch, Batch]],
    replay: Iterable[Batch],
    exchange: OutputExchange,
    *,
    record: Record = _not_recorded,
) -> Sums:
    """Add up the gradient of one effective batch for a loss across samples, exactly.

    Equal to one backward of `function(model, outputs)` with the outputs of all samples of all ranks in one graph. The
    second pass draws the same random numbers as the first, and buffers end as after a single pass.

    Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021, section 3.
    """
    # The second pass must start with the same buffers as the first to compute the same outputs.
    buffers = BufferValues(modules)
    sums = Sums()

    # 1. Encode every micro-batch; the graph of the last one is kept.
    done, outputs = encode_all(context, context.loss, micro_batches, record)
    # 2. Gather the outputs of all ranks; compute the loss and its gradient with respect to them.
    loss_gradient = _loss_gradient(context, outputs, exchange)
    if loss_gradient is None:
        return sums
    # On one rank only: contributions are summed over ranks, and each rank has the whole loss.
    if exchange.reports_loss:
        sums.contributions.append(((TermFactors(1.0, 1.0, float(exchange.plan.num_samples)),), [loss_gradient.value]))
    # 3. Run the backward of each micro-batch with its rows of that gradient. The kept graph, of the last micro-batch,
    # comes first, so that it can be freed; turns follow the order of backwards.
    turns = [micro_batch.turn for micro_batch in done]
    if outputs.graph:
        _backward_kept(context, done[-1], turns[0], outputs, loss_gradient)
        done = done[:-1]
    if done:
        # Running statistics were updated in the first pass and must not count a micro-batch twice.
        after = BufferValues(modules)
        buffers.restore()
        final = HostDraws() if any(outputs.host_draws) else None
        with trial_run():
            # Not strict: the replay has one more batch if the last micro-batch's graph was kept.
            again = zip(done, outputs.host_draws, turns[-len(done) :], replay, strict=False)
            _replay(context, again, loss_gradient)
        if final is not None:
            final.restore()
        after.restore()
    return sums


def run_trial(
    context: LoopContext, modules: nn.Module, micro_batches: Sequence[tuple[MicroBatch, Batch]], num_samples: int
) -> None:
    """Run micro-batches on this rank alone, with the memory that they need in an effective batch of `num_samples`.

    For a loss across samples, rows are repeated up to `num_samples`.
    """

    def gather(outputs: Outputs) -> tuple[list[torch.Tensor], tuple[bool, ...]]:
        columns = [torch.cat(column) for column in zip(*outputs.pieces, strict=True)]
        # The memory of the loss depends on the number of rows, and the trial may run fewer samples.
        rows = torch.arange(num_samples) % len(columns[0])
        return [column[rows.to(column.device)] for column in columns], outputs.differentiable

    plan = plan_batch(num_samples, 1, Cut())
    exchange = OutputExchange(gather=gather, plan=plan, reports_loss=True, seed=0)
    replay = [copied(batch) for _, batch in micro_batches]
    accumulate_in_two_passes(context, modules, micro_batches, replay, exchange)


def encode_all(
    context: LoopContext,
    loss: Loss,
    micro_batches: Iterable[tuple[MicroBatch, Batch]],
    record: Record = _not_recorded,
    outputs: Outputs | None = None,
) -> tuple[list[MicroBatch], Outputs]:
    """Encode this rank's micro-batches, with the activations of one at a time; append to `outputs` if given.

    Gradients stay enabled although only the last graph is used: without them, compiled code and models that check
    `is_grad_enabled` may run differently and draw other random numbers.
    """
    done: list[MicroBatch] = []
    outputs = outputs or Outputs()
    for micro_batch, batch in micro_batches:
        outputs.graph = []  # free the previous graph before the next forward
        # Never the last turn: reductions start in a backward of the second pass.
        drawing, host = context.randomness.micro_batch(micro_batch), HostDraws()
        with drawing, context.strategy.micro_batch(_NOT_LAST), record(micro_batch), context.autocast():
            outputs.graph, outputs.rebuild = flatten_batch(context.prepared.call(_encode(loss), batch))
        _note(outputs, micro_batch)
        outputs.host_draws.append(host.keep_if_drawn())
        done.append(micro_batch)
    # With one micro-batch the kept backward is the last one, for which DDP needs a forward that ran as the last one.
    not_in_turn = len(done) == 1 and context.strategy.capabilities.prepares_in_forward
    if not_in_turn or context.randomness.covers_backward:
        outputs.graph = []  # its backward cannot run separately from its forward
    return done, outputs


def gather_outputs(
    outputs: Outputs,
    plan: BatchPlan,
    world: World,
    collective: CollectiveContext,
    note_exchange: Callable[[], None] = lambda: None,
) -> tuple[list[torch.Tensor], tuple[bool, ...]]:
    """Return the tensors of all samples of all ranks in the order of the plan, and which require a gradient."""
    # Shares are consecutive, so the order of ranks is the order of the plan.
    sizes = [sum(unit.num_samples for unit in share if unit.weight) for share in plan.shares]
    # Allocate first: after the next message no rank may stay away from the collective.
    buffers = None if outputs.kinds is None else make_gather_buffers(outputs.kinds, sizes, world)
    # In the control group, so that a rank without samples can take part, and a mismatch raises instead of hanging.
    # Digests of the step are compared here too, since the rows of different batches cannot be combined.
    digests = () if world.roll_call is None else world.roll_call.digests
    everyone = world.gather_from_processes((outputs.kinds, outputs.differentiable, digests))
    _raise_if_left(everyone)
    _compare([one[2] for one in everyone])
    from_all = world.of_ranks(everyone)
    note_exchange()
    found = [one for one in from_all if one[0] is not None]
    kinds = found[0][0]
    for other, *_ in found:
        _refuse_other_kinds(kinds, other, "on one rank and on another")
    if buffers is None and world.size > 1:  # a rank without micro-batches receives the shapes only now
        try:
            buffers = make_gather_buffers(kinds, sizes, world)
        except torch.OutOfMemoryError as error:
            message = "out of memory for the outputs of all ranks, which are being sent already"
            raise CannotRedoError(message, rank=world.process, phase="forward_backward") from error
    tensors = gather_rows(outputs.pieces, kinds, sizes, world, collective, buffers=buffers)
    # All ranks must treat an output alike, even if it requires a gradient on some of them only.
    return tensors, tuple(map(any, zip(*(flags for _, flags, _ in found), strict=True)))


def abort_exchange(world: World, *, failed: bool) -> None:
    """Join the first message of `gather_outputs`, to report that this rank leaves the step.

    Raises:
        StepFailedError: this rank has run out of memory, and another one has failed.
    """
    world.leave_together()
    everyone = world.gather_from_processes(_FAILED if failed else _OUT_OF_MEMORY)
    if not failed:
        with suppress(StepAbortedError):
            _raise_if_left(everyone)


def _raise_if_left(from_all: Sequence[object]) -> None:
    """Raise if a rank has sent that it leaves the step."""
    if _FAILED in from_all:
        raise StepFailedError
    if _OUT_OF_MEMORY in from_all:
        raise StepAbortedError


def _compare(digests: Sequence[tuple[int, ...]]) -> None:
    """Raise if ranks run different steps."""
    if differing := tuple(number for number, row in enumerate(zip(*digests, strict=True)) if len(set(row)) > 1):
        raise StepsDifferError(differing)


def first_rank_with_samples(plan: BatchPlan) -> int:
    """Return the first rank with samples in its share."""
    return next(rank for rank, share in enumerate(plan.shares) if any(unit.weight for unit in share))


def call_on_whole(context: LoopContext, loss: Loss, outputs: Batch, seed: int) -> object:
    """Return the result of the loss function for the outputs of a whole effective batch."""
    # Every rank computes the whole loss, so all ranks must draw the same random numbers.
    context.randomness.whole(seed)
    with context.strategy.micro_batch(_NOT_LAST), context.autocast():
        return context.prepared.call(loss.function, outputs)


def one_number(value: object) -> torch.Tensor:
    """Return the value of a loss across samples."""
    if isinstance(value, torch.Tensor) and not value.dim():
        return value
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    message = (
        f"the function of ab.joint returned {what}; it must return one number with shape (), the loss of the whole "
        "effective batch. Return the mean, or declare a loss of single samples with ab.mean_over_samples."
    )
    raise LossError(message)


def _encode(loss: Loss) -> LossFunction:
    assert loss.kind.encode is not None, "not a loss across samples"
    return loss.kind.encode


def _note(outputs: Outputs, micro_batch: MicroBatch) -> None:
    """Check and copy the tensors of the micro-batch that was just encoded."""
    tensors, num_samples = outputs.graph, micro_batch.unit.num_samples
    if not tensors:
        message = (
            "the encode function of ab.joint returned no tensor. Return a tensor, or a dict, tuple or dataclass of "
            "tensors, whose first axis is the samples."
        )
        raise LossError(message)
    for tensor in tensors:
        if not tensor.dim() or len(tensor) != num_samples:
            message = (
                f"the encode function of ab.joint returned a tensor of shape {tuple(tensor.shape)} for a micro-batch "
                f"of {num_samples} samples. The first axis of every tensor must be the samples."
            )
            raise LossError(message)
    kinds = tuple(RowLayout(tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors)
    _refuse_other_kinds(outputs.kinds or kinds, kinds, "for one micro-batch and for another")
    before = outputs.differentiable or (False,) * len(tensors)
    outputs.kinds = kinds
    outputs.differentiable = tuple(one or tensor.requires_grad for one, tensor in zip(before, tensors, strict=True))
    if micro_batch.unit.weight:  # copies, because a view would keep its base alive
        outputs.pieces.append([tensor.detach().clone() for tensor in tensors])


def _refuse_other_kinds(one: tuple[RowLayout, ...], other: tuple[RowLayout, ...], where: str) -> None:
    if one == other:
        return
    shapes = [", ".join(f"{('samples', *kind.shape)} of {kind.dtype}" for kind in kinds) for kinds in (one, other)]
    message = (
        f"the encode function of ab.joint returned {shapes[0]} and {shapes[1]} {where}. Shapes may differ in the "
        "number of samples only: pool over time, or pad to one length."
    )
    raise LossError(message)


def _loss_gradient(context: LoopContext, outputs: Outputs, exchange: OutputExchange) -> LossGradient | None:
    """Return the gradient of the loss of the whole effective batch; None on a rank without micro-batches."""
    tensors, differentiable = exchange.gather(outputs)
    if outputs.rebuild is None:
        return None
    if not torch.is_grad_enabled():
        raise without_graph()
    # The graph of the loss begins here: the encoder's graphs are freed, and the second pass builds them again.
    leaves = [tensor.requires_grad_(flag) for tensor, flag in zip(tensors, differentiable, strict=True)]
    whole = _in_batch_order(leaves, exchange.plan)
    value = one_number(call_on_whole(context, context.loss, outputs.rebuild(whole), exchange.seed))
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    parameters = context.prepared.leaves
    found: Sequence[torch.Tensor | None] = []
    if value.requires_grad:
        # Not `backward`, which would add to `.grad` and start reductions before the last micro-batch.
        found = torch.autograd.grad(context.scaler.scale(value), [*wanted, *parameters], allow_unused=True)
    if all(gradient is None for gradient in found[: len(wanted)]):
        message = (
            "the function of ab.joint does not depend on any output of encode that requires a gradient, so the encoder "
            "would not be trained. Use the outputs that the function receives, and do not detach them."
        )
        raise LossError(message)
    remaining = iter(found[: len(wanted)])
    used = [(p, g) for p, g in zip(parameters, found[len(wanted) :], strict=True) if g is not None]
    return LossGradient(
        value.detach(),
        tuple(next(remaining) if leaf.requires_grad else None for leaf in leaves),
        tuple(parameter for parameter, _ in used),
        tuple(gradient if exchange.reports_loss else torch.zeros_like(gradient) for _, gradient in used),
    )


def _in_batch_order(tensors: Sequence[torch.Tensor], plan: BatchPlan) -> list[torch.Tensor]:
    """Return tensors of a whole effective batch with their rows in the order of the batch; differentiable."""
    if plan.order is None:
        return list(tensors)
    # Row k holds the sample at position order[k]; the inverse permutation puts it back there.
    inverse = torch.tensor(plan.order).argsort()
    return [tensor[inverse.to(tensor.device)] for tensor in tensors]


def _backward_kept(
    context: LoopContext, micro_batch: MicroBatch, turn: Turn, outputs: Outputs, loss_gradient: LossGradient
) -> None:
    """Run the backward of the kept graph, and free it."""
    before, after = context.callbacks()
    for look in before:
        look(micro_batch)
    with context.strategy.micro_batch(replace(turn, backward_only=True)):
        roots = [
            root for root, slopes in zip(outputs.graph, loss_gradient.of_outputs, strict=True) if slopes is not None
        ]
        outputs.graph = []
        # Parameters of the loss function are part of the last backward, so that their reduction starts in it.
        _backward(context, micro_batch, [*roots, *(loss_gradient.parameters if turn.last else ())], loss_gradient)
    for note in after:
        note(micro_batch, ())


def _replay(
    context: LoopContext,
    again: Iterable[tuple[MicroBatch, HostDraws | None, Turn, Batch]],
    loss_gradient: LossGradient,
) -> None:
    """Encode micro-batches again, each followed by its backward."""
    encode = _encode(context.loss)
    # A strategy that prepares its backward in the forward, such as DDP, sees only tensors that the forward returns.
    in_forward = context.strategy.capabilities.prepares_in_forward

    def run(model: object, batch: Batch) -> list[torch.Tensor]:
        tensors, _ = flatten_batch(encode(model, batch))
        return [
            tensor for tensor, gradient in zip(tensors, loss_gradient.of_outputs, strict=True) if gradient is not None
        ]

    def run_last(model: object, batch: Batch) -> list[torch.Tensor]:
        return [*run(model, batch), *(parameter.view_as(parameter) for parameter in loss_gradient.parameters)]

    before, after = context.callbacks()
    for micro_batch, draws, turn, batch in again:
        for look in before:
            look(micro_batch)
        if draws is not None:
            draws.restore()
        with context.randomness.micro_batch(micro_batch), context.strategy.micro_batch(turn):
            with context.autocast():
                roots = context.prepared.call(run_last if turn.last and in_forward else run, batch)
            if turn.last and not in_forward:
                roots = [*roots, *loss_gradient.parameters]
            _backward(context, micro_batch, roots, loss_gradient)
            del roots  # free the graph before the next forward
        for note in after:
            note(micro_batch, ())


def _backward(
    context: LoopContext, micro_batch: MicroBatch, roots: Sequence[torch.Tensor], loss_gradient: LossGradient
) -> None:
    """Run one backward from the outputs of a micro-batch and, in the last one, the loss function's parameters."""
    unit = micro_batch.unit
    rows = [gradient[unit.start : unit.stop] for gradient in loss_gradient.of_outputs if gradient is not None]
    if not unit.weight:  # padding that keeps ranks in lockstep
        rows = [torch.zeros_like(row) for row in rows]
    if len(roots) > len(rows):
        rows += loss_gradient.of_parameters
    pairs = [(root, row) for root, row in zip(roots, rows, strict=True) if root.requires_grad]
    torch.autograd.backward(
        [root for root, _ in pairs], [row for _, row in pairs], inputs=context.prepared.backward_inputs
    )


class TwoPasses:
    """For a loss across samples. Until outputs are exchanged, other ranks wait in that exchange."""

    def __init__(
        self,
        context: LoopContext,
        modules: nn.Module,
        world: World,
        notifier: Notifier,
        batch_norm: BatchNormRunner,
        *,
        abort: Abort,
    ) -> None:
        self._context = context
        self._modules = modules
        self._world = world
        self._notifier = notifier
        self._batch_norm = batch_norm
        self._abort = abort
        self._have_exchanged = False

    def begin_step(self) -> None:
        """Reset the flag that outputs have been exchanged."""
        self._have_exchanged = False

    def __call__(self, counted: CountedBatch) -> Sums:
        """Encode all micro-batches, gather the outputs, and encode again with the gradient of the loss."""
        # Reset in each try: it determines the collective in which a rank that aborts meets the others.
        plan, self._have_exchanged = counted.planned.plan, False
        exchange = OutputExchange(
            gather=lambda outputs: gather_outputs(
                outputs, plan, self._world, self._notifier.gathering, self._note_exchange
            ),
            plan=plan,
            # Every rank computes the whole loss, and ranks are summed, so only one rank may report it.
            reports_loss=first_rank_with_samples(plan) == self._world.rank,
            seed=counted.seed,
        )
        is_observed = bool(self._notifier.observers)
        micro_batches = self._notifier.timed(counted.micro_batches) if is_observed else counted.micro_batches
        with self._batch_norm.two_passes() as record:
            return accumulate_in_two_passes(
                self._context, self._modules, micro_batches, counted.replay, exchange, record=record
            )

    def abort(self, *, failed: bool) -> None:
        """Leave the step, before or after the exchange of outputs."""
        if self._have_exchanged:
            self._abort(failed=failed)
        else:
            abort_exchange(self._world, failed=failed)

    def _note_exchange(self) -> None:
        self._have_exchanged = True
