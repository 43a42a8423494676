"""Losses across samples: two passes, and in between the loss of the whole effective batch."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from anybatch.core.buffers import BufferValues
from anybatch.core.loss import Loss, TermFactors, without_graph
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.splitting import BatchPlan, Cut, plan_batch
from anybatch.core.tree import Batch, copied, take_apart
from anybatch.engine.accumulation.accumulate import LoopContext, MicroBatch, accumulate
from anybatch.engine.accumulation.sums import Sums
from anybatch.engine.side_effects import trial_run
from anybatch.errors import CannotRedoError, LossError
from anybatch.parallel.all_gather import RowLayout, gather_rows, make_gather_buffers
from anybatch.parallel.step_agreement import StepAbortedError, StepFailedError, StepsDifferError
from anybatch.parallel.strategy import Turn
from anybatch.parallel.world import World

CollectiveContext = Callable[[int], AbstractContextManager[object]]
"""Context of the collective that brings outputs together, given the bytes that this rank hands over."""

Record = Callable[[MicroBatch], AbstractContextManager[object]]
"""Context of the forward in which running statistics see a micro-batch; the second pass is not seen."""

_NOT_LAST = Turn(first=False, last=False)
# Sent by a rank that leaves, in the place of what it has encoded.
_OUT_OF_MEMORY, _FAILED = "out of memory", "failed"


def _not_recorded(micro_batch: MicroBatch) -> AbstractContextManager[object]:
    del micro_batch
    return nullcontext()


@dataclass(slots=True)
class Outputs:
    """Outputs of this rank's micro-batches.

    Attributes:
        pieces: per micro-batch that counts a copy of its tensors, in the order of the nested structure.
        kinds: what the rows of these tensors look like; None on a rank that ran nothing.
        differentiable: which of them take a gradient.
        put_together: makes the nested structure of such tensors.
        graph: the last micro-batch's tensors as its forward returned them, so that it need not run again.
    """

    pieces: list[list[torch.Tensor]] = field(default_factory=list)
    kinds: tuple[RowLayout, ...] | None = None
    differentiable: tuple[bool, ...] = ()
    put_together: Callable[[Iterable[torch.Tensor]], Batch] | None = None
    graph: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputExchange:
    """How the outputs of micro-batches become those of the whole effective batch.

    Attributes:
        gather: returns the tensors of all samples in the order of the plan, and which take a gradient.
        plan: how the effective batch is cut.
        reports_loss: this rank, and no other, reports the loss and the gradients of what the loss function itself uses.
        seed: for what the loss function draws.
    """

    gather: Callable[[Outputs], tuple[list[torch.Tensor], tuple[bool, ...]]]
    plan: BatchPlan
    reports_loss: bool
    seed: int


@dataclass(frozen=True, slots=True)
class LossGradient:
    """The loss of the whole effective batch, and its gradient where the second pass begins.

    Attributes:
        value: the loss, detached.
        of_outputs: per tensor the gradient (samples of the effective batch, ...); None where there is none.
        parameters: those that the loss function itself uses.
        of_parameters: their gradients; zeros on all ranks but the one that reports the loss, since ranks are summed.
    """

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
    """Add up the gradient of one effective batch under a loss that looks across its samples, exactly.

    Equal to one backward of `function(model, outputs)` with the outputs of all samples of all ranks in one graph. The
    second pass draws the same random numbers as the first, and buffers are as if there had been one pass only.

    Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021, section 3.
    """
    # The second pass has to meet the buffers that the first one met, or it would encode something else.
    buffers = BufferValues(modules)
    sums = Sums()

    # 1. Encode every micro-batch; the graph of the last one is kept.
    done, outputs = encode_all(context, context.loss, micro_batches, record)
    # 2. Bring the outputs of all ranks together; the loss, and its gradient with respect to them.
    loss_gradient = _loss_gradient(context, outputs, exchange)
    if loss_gradient is None:
        return sums
    # One rank alone: contributions are summed over ranks, and each rank knows the whole loss.
    if exchange.reports_loss:
        sums.contributions.append(((TermFactors(1.0, 1.0, float(exchange.plan.num_samples)),), [loss_gradient.value]))
    # 3. Pass its rows of that gradient on to each micro-batch: first to the kept graph, so that it can be freed.
    # The kept graph runs first, though it belongs to the last micro-batch; turns go by the order of backwards.
    turns = [micro_batch.turn for micro_batch in done]
    if outputs.graph:
        _backward_kept(context, done[-1], turns[0], outputs, loss_gradient)
        done = done[:-1]
    if done:
        # Running statistics have seen each micro-batch in the first pass and must not count it twice.
        after = BufferValues(modules)
        buffers.restore()
        with trial_run():
            _replay(context, done, turns[-len(done) :], replay, loss_gradient)
        after.restore()
    return sums


def run_trial(
    context: LoopContext, modules: nn.Module, micro_batches: Sequence[tuple[MicroBatch, Batch]], num_samples: int
) -> None:
    """Run micro-batches, on this rank alone, for the memory that they take in an effective batch of `num_samples`.

    A loss across samples gets as many rows as it will get then, over and over the same.
    """
    if context.loss.kind.encode is None:
        accumulate(context, micro_batches)
        return

    def gather(outputs: Outputs) -> tuple[list[torch.Tensor], tuple[bool, ...]]:
        columns = [torch.cat(column) for column in zip(*outputs.pieces, strict=True)]
        # The trial may run fewer samples than the batch has, and the loss takes memory by the number of its rows.
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
    """Encode this rank's micro-batches, with the activations of one at a time; go on from `outputs` if it is given.

    Gradients are on although only the last graph is used: models that ask `is_grad_enabled`, and compiled code, may
    take another way without them, and draw other random numbers.

    Raises:
        LossError: `encode` returned no tensors, or tensors whose first axis is not the samples.
    """
    done: list[MicroBatch] = []
    outputs = outputs or Outputs()
    for micro_batch, batch in micro_batches:
        outputs.graph = []  # the graph of the one before goes first
        # Never the last turn: reductions start in a backward of the second pass.
        drawing = context.randomness.micro_batch(micro_batch)
        with drawing, context.strategy.micro_batch(_NOT_LAST), record(micro_batch), context.autocast():
            outputs.graph, outputs.put_together = take_apart(context.prepared.call(_encode(loss), batch))
        _note(outputs, micro_batch)
        done.append(micro_batch)
    # With one micro-batch the kept backward is the last one, for which DDP needs a forward that ran as the last one.
    not_in_turn = len(done) == 1 and context.strategy.capabilities.prepares_in_forward
    if not_in_turn or context.randomness.covers_backward:
        outputs.graph = []  # its backward cannot be run by itself
    return done, outputs


def gather_outputs(
    outputs: Outputs,
    plan: BatchPlan,
    world: World,
    collective: CollectiveContext,
    note_exchange: Callable[[], None] = lambda: None,
) -> tuple[list[torch.Tensor], tuple[bool, ...]]:
    """Return the tensors of all samples of all ranks in the order of the plan, and which of them take a gradient.

    Args:
        outputs: this rank's.
        plan: whose samples they are.
        world: the ranks.
        collective: makes the context of the collective.
        note_exchange: called when every rank is known to be there, before anything is gathered.

    Raises:
        LossError: ranks have encoded to tensors of other shapes or types; on every rank.
        StepAbortedError: a rank has run out of memory before.
        StepFailedError: a rank has failed before.
        StepsDifferError: ranks do not mean the same step.
    """
    # Shares are consecutive, so that rank by rank is in the order of the plan.
    sizes = [sum(unit.num_samples for unit in share if unit.weight) for share in plan.shares]
    # A rank that says that it is there has room for what comes: after that none may stay away from the collective.
    buffers = None if outputs.kinds is None else make_gather_buffers(outputs.kinds, sizes, world)
    # In the control group, so that a rank without samples can take part, and a mismatch is an error and no hang.
    # What ranks mean by the step is compared here too: the rows of different batches cannot be put together.
    digests = () if world.roll_call is None else world.roll_call.digests
    everyone = world.gather_from_processes((outputs.kinds, outputs.differentiable, digests))
    _look_for_leavers(everyone)
    _compare([one[2] for one in everyone])
    from_all = world.of_ranks(everyone)
    note_exchange()
    found = [one for one in from_all if one[0] is not None]
    kinds = found[0][0]
    for other, *_ in found:
        _refuse_other_kinds(kinds, other, "on one rank and on another")
    if buffers is None and world.size > 1:  # a rank that ran nothing has learnt only now what is going to come
        try:
            buffers = make_gather_buffers(kinds, sizes, world)
        except torch.OutOfMemoryError as error:
            message = "there is no room for the outputs of all ranks, which these are sending already"
            raise CannotRedoError(message, rank=world.process, phase="forward_backward") from error
    tensors = gather_rows(outputs.pieces, kinds, sizes, world, collective, buffers=buffers)
    # All ranks must treat an output alike, also one that takes a gradient on some of them only.
    return tensors, tuple(map(any, zip(*(flags for _, flags, _ in found), strict=True)))


def abort_exchange(world: World, *, failed: bool) -> None:
    """Take part in what `gather_outputs` does first, to tell the other ranks that this one leaves.

    Args:
        world: the ranks.
        failed: it has failed; otherwise it has run out of memory.

    Raises:
        StepFailedError: another rank has failed, where this one has run out of memory.
    """
    world.leave_together()
    everyone = world.gather_from_processes(_FAILED if failed else _OUT_OF_MEMORY)
    if not failed:
        with suppress(StepAbortedError):
            _look_for_leavers(everyone)


def _look_for_leavers(from_all: Sequence[object]) -> None:
    """Raise if a rank has sent, in the place of what it has encoded, that it leaves."""
    if _FAILED in from_all:
        raise StepFailedError
    if _OUT_OF_MEMORY in from_all:
        raise StepAbortedError


def _compare(digests: Sequence[tuple[int, ...]]) -> None:
    """Raise if ranks do not mean the same step."""
    if differing := tuple(number for number, row in enumerate(zip(*digests, strict=True)) if len(set(row)) > 1):
        raise StepsDifferError(differing)


def first_rank_with_samples(plan: BatchPlan) -> int:
    """Return the first rank that has samples in its share."""
    return next(rank for rank, share in enumerate(plan.shares) if any(unit.weight for unit in share))


def call_on_whole(context: LoopContext, loss: Loss, outputs: Batch, seed: int) -> object:
    """Return what the loss function makes of the outputs of a whole effective batch."""
    # Every rank computes the whole loss, so every rank has to draw the same numbers.
    context.randomness.whole(seed)
    with context.strategy.micro_batch(_NOT_LAST), context.autocast():
        return context.prepared.call(loss.function, outputs)


def one_number(value: object) -> torch.Tensor:
    """Return the value of a loss across samples, after a look at it.

    Raises:
        LossError: it is not one number.
    """
    if isinstance(value, torch.Tensor) and not value.dim():
        return value
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    message = (
        f"the function of ab.joint returned {what}; it must return the loss of the whole effective batch, one number "
        "without an axis. Return its mean, or declare a loss of single samples with ab.mean_over_samples."
    )
    raise LossError(message)


def _encode(loss: Loss) -> LossFunction:
    assert loss.kind.encode is not None, "this is no loss across samples"
    return loss.kind.encode


def _note(outputs: Outputs, micro_batch: MicroBatch) -> None:
    """Copy the tensors of a micro-batch that has just been encoded, after a look at them."""
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
    if micro_batch.unit.weight:  # copies, because a view would keep alive what it is a view of
        outputs.pieces.append([tensor.detach().clone() for tensor in tensors])


def _refuse_other_kinds(one: tuple[RowLayout, ...], other: tuple[RowLayout, ...], where: str) -> None:
    if one == other:
        return
    said = [", ".join(f"{('samples', *kind.shape)} of {kind.dtype}" for kind in kinds) for kinds in (one, other)]
    message = (
        f"the encode function of ab.joint returned {said[0]} and {said[1]} {where}. All micro-batches must give the "
        "same tensors but for the number of samples: pool over time, or pad to one length."
    )
    raise LossError(message)


def _loss_gradient(context: LoopContext, outputs: Outputs, exchange: OutputExchange) -> LossGradient | None:
    """Return the gradient of the loss of the whole effective batch; None on a rank that has run nothing."""
    tensors, differentiable = exchange.gather(outputs)
    if outputs.put_together is None:
        return None
    if not torch.is_grad_enabled():
        raise without_graph()
    # The graph of the loss begins here: the encoder's own graphs are gone, and the second pass makes them again.
    leaves = [tensor.requires_grad_(flag) for tensor, flag in zip(tensors, differentiable, strict=True)]
    whole = _in_batch_order(leaves, exchange.plan)
    value = one_number(call_on_whole(context, context.loss, outputs.put_together(whole), exchange.seed))
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    parameters = context.prepared.leaves
    found: Sequence[torch.Tensor | None] = []
    if value.requires_grad:
        # `grad` and not `backward`, which would add to `.grad` and set off reductions before the last micro-batch.
        found = torch.autograd.grad(context.scaler.scale(value), [*wanted, *parameters], allow_unused=True)
    if all(gradient is None for gradient in found[: len(wanted)]):
        message = (
            "the value of the function of ab.joint does not depend on any output of encode that takes a gradient, so "
            "the encoder would not be trained. Use the outputs it is given, and detach neither them nor the encoder's."
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
    """Return tensors of a whole effective batch with their rows in the batch's own order; differentiable."""
    if plan.order is None:
        return list(tensors)
    # Row k holds the sample at position order[k]; the inverse permutation puts it back there.
    inverse = torch.tensor(plan.order).argsort()
    return [tensor[inverse.to(tensor.device)] for tensor in tensors]


def _backward_kept(
    context: LoopContext, micro_batch: MicroBatch, turn: Turn, outputs: Outputs, loss_gradient: LossGradient
) -> None:
    """Run the backward of the micro-batch whose graph was kept, and free it."""
    context.before(micro_batch)
    with context.strategy.micro_batch(replace(turn, backward_only=True)):
        roots = [
            root for root, slopes in zip(outputs.graph, loss_gradient.of_outputs, strict=True) if slopes is not None
        ]
        outputs.graph = []
        # Parameters of the loss function join the last backward, so that their reduction starts within it.
        _backward(context, micro_batch, [*roots, *(loss_gradient.parameters if turn.last else ())], loss_gradient)
    context.after(micro_batch, ())


def _replay(
    context: LoopContext,
    micro_batches: Sequence[MicroBatch],
    turns: Sequence[Turn],
    replay: Iterable[Batch],
    loss_gradient: LossGradient,
) -> None:
    """Encode micro-batches again, and pass the gradient on at once."""
    encode = _encode(context.loss)
    # A strategy whose forward has to meet what the backward will reach, as DDP's, meets only what a forward returns.
    in_forward = context.strategy.capabilities.prepares_in_forward

    def run(model: object, batch: Batch) -> list[torch.Tensor]:
        tensors, _ = take_apart(encode(model, batch))
        return [
            tensor for tensor, gradient in zip(tensors, loss_gradient.of_outputs, strict=True) if gradient is not None
        ]

    def run_last(model: object, batch: Batch) -> list[torch.Tensor]:
        return [*run(model, batch), *(parameter.view_as(parameter) for parameter in loss_gradient.parameters)]

    # Not strict: the replay has one batch more where the last micro-batch's graph was kept.
    for micro_batch, turn, batch in zip(micro_batches, turns, replay, strict=False):
        context.before(micro_batch)
        with context.randomness.micro_batch(micro_batch), context.strategy.micro_batch(turn):
            with context.autocast():
                roots = context.prepared.call(run_last if turn.last and in_forward else run, batch)
            if turn.last and not in_forward:
                roots = [*roots, *loss_gradient.parameters]
            _backward(context, micro_batch, roots, loss_gradient)
            del roots  # or it would live through the next forward
        context.after(micro_batch, ())


def _backward(
    context: LoopContext, micro_batch: MicroBatch, roots: Sequence[torch.Tensor], loss_gradient: LossGradient
) -> None:
    """Run one backward from the outputs of a micro-batch and, in the last one, the loss function's own parameters."""
    unit = micro_batch.unit
    rows = [gradient[unit.start : unit.stop] for gradient in loss_gradient.of_outputs if gradient is not None]
    if not unit.weight:  # it only keeps ranks in lockstep
        rows = [torch.zeros_like(row) for row in rows]
    if len(roots) > len(rows):
        rows += loss_gradient.of_parameters
    pairs = [(root, row) for root, row in zip(roots, rows, strict=True) if root.requires_grad]
    torch.autograd.backward(
        [root for root, _ in pairs], [row for _, row in pairs], inputs=context.prepared.backward_inputs
    )
