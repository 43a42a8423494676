"""`ab.joint`, losses across samples: encode all micro-batches, compute the loss of the whole batch, encode again."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from anybatch.core.loss import Loss, TermFactors, without_graph
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.splitting import BatchPlan, SplitOptions, plan_batch
from anybatch.core.torch_internals import kept_buffers
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
    StepsDifferError,
    gather_rows,
    make_gather_buffers,
)
from anybatch.parallel.strategy import Turn
from anybatch.parallel.world import World

CollectiveContext = Callable[[int], AbstractContextManager[object]]
"""Function (bytes that this rank sends) -> context of the collective that gathers outputs."""

Record = Callable[[MicroBatch], AbstractContextManager[object]]
"""Function (micro-batch) -> context of its forward in the first pass, which records BatchNorm's statistics."""

_NOT_LAST = Turn(first=False, last=False)
_OUT_OF_MEMORY = "out of memory"
"""The value that a rank sends instead of its outputs if it aborts the step."""


@dataclass(slots=True)
class Outputs:
    """Outputs of this rank's micro-batches.

    Attributes:
        pieces: the detached tensors of each micro-batch.
        kinds: the shape of a row, and the dtype, of each tensor.
        differentiable: for each tensor, whether it requires a gradient in any micro-batch.
        rebuild: function (tensors) -> a nested output with these tensors.
        graph: the tensors of the last micro-batch, with their graph.
        host_draws: the states of Python's and numpy's generators before each forward; None if it drew no numbers.
    """

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
    record: Record = lambda _: nullcontext(),
) -> Sums:
    """Add up the exact gradient of one effective batch for a loss across samples.

    It equals the gradient of one backward of `function(model, outputs)` with the outputs of all samples of all ranks
    in one graph. The second pass draws the same random numbers as the first. At the end, buffers have the values of one
    pass.

    Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021, section 3.
    """
    # The second pass must start with the same buffers as the first to compute the same outputs.
    buffers = kept_buffers(modules)
    sums = Sums()

    # 1. Encode every micro-batch; the graph of the last one is kept.
    done, outputs = encode_all(context, context.loss, micro_batches, record)
    # 2. Gather the outputs of all ranks; compute the loss and its gradient with respect to them.
    loss_gradient = _loss_gradient(context, outputs, exchange)
    if loss_gradient is None:
        return sums
    # Reported on one rank only, because every rank has the whole loss, and contributions are summed over ranks.
    if exchange.reports_loss:
        sums.contributions.append(((TermFactors(1.0, 1.0, float(exchange.plan.num_samples)),), [loss_gradient.value]))
    # 3. Run the backward of each micro-batch with its rows of the gradient. The last micro-batch, whose graph was kept,
    # is first, so that its graph can be freed; `Turn.first` and `Turn.last` refer to the order of the backwards.
    turns = [micro_batch.turn for micro_batch in done]
    if outputs.graph:
        _backward_kept(context, done[-1], turns[0], outputs, loss_gradient)
        done = done[:-1]
    if done:
        # Running statistics were updated in the first pass, and must not be updated again in the second.
        after = kept_buffers(modules)
        buffers.restore()
        final = HostDraws() if any(outputs.host_draws) else None
        with trial_run():
            # Not strict: the replay has one more batch if the last micro-batch's graph was kept.
            second_pass = zip(done, outputs.host_draws, turns[-len(done) :], replay, strict=False)
            _replay(context, second_pass, loss_gradient)
        if final is not None:
            final.restore()
        after.restore()
    return sums


def run_trial(
    context: LoopContext, modules: nn.Module, micro_batches: Sequence[tuple[MicroBatch, Batch]], num_samples: int
) -> None:
    """Run micro-batches of a loss across samples on this rank, with the memory of an effective batch of `num_samples`.

    Rows of outputs are repeated up to `num_samples`, because the memory of the loss depends on their number.
    """

    def gather(outputs: Outputs) -> tuple[list[torch.Tensor], tuple[bool, ...]]:
        columns = [torch.cat(column) for column in zip(*outputs.pieces, strict=True)]
        rows = torch.arange(num_samples) % len(columns[0])
        return [column[rows.to(column.device)] for column in columns], outputs.differentiable

    plan = plan_batch(num_samples, 1, SplitOptions())
    exchange = OutputExchange(gather=gather, plan=plan, reports_loss=True, seed=0)
    replay = [copied(batch) for _, batch in micro_batches]
    accumulate_in_two_passes(context, modules, micro_batches, replay, exchange)


def encode_all(
    context: LoopContext,
    loss: Loss,
    micro_batches: Iterable[tuple[MicroBatch, Batch]],
    record: Record = lambda _: nullcontext(),
    outputs: Outputs | None = None,
) -> tuple[list[MicroBatch], Outputs]:
    """Encode this rank's micro-batches one at a time, and append the results to `outputs` if given.

    Gradients stay enabled although only the last graph is used: without gradients, compiled code and models that check
    `is_grad_enabled` may run differently and draw other random numbers.
    """
    done: list[MicroBatch] = []
    outputs = outputs or Outputs()
    for micro_batch, batch in micro_batches:
        outputs.graph = []  # free the previous graph before the next forward
        # Never with `last=True`, since reductions start in a backward of the second pass.
        drawing, host = context.randomness.micro_batch(micro_batch), HostDraws()
        with drawing, context.strategy.micro_batch(_NOT_LAST), record(micro_batch), context.autocast():
            outputs.graph, outputs.rebuild = flatten_batch(context.prepared.call(_encode(loss), batch))
        _record_outputs(outputs, micro_batch)
        outputs.host_draws.append(host.keep_if_drawn())
        done.append(micro_batch)
    # A single micro-batch has the last backward, and DDP prepares the last backward in a forward with `last=True`.
    needs_last_forward = len(done) == 1 and context.strategy.capabilities.prepares_in_forward
    if needs_last_forward or context.randomness.covers_backward:
        outputs.graph = []  # its backward cannot run separately from its forward
    return done, outputs


def gather_outputs(
    outputs: Outputs,
    plan: BatchPlan,
    world: World,
    collective: CollectiveContext,
    on_exchange: Callable[[], None] = lambda: None,
) -> tuple[list[torch.Tensor], tuple[bool, ...]]:
    """Return the rows of all samples of all ranks, in the plan's order, and which tensors require a gradient."""
    # Shares are consecutive, so the order of ranks is the order of the plan.
    sizes = [sum(unit.num_samples for unit in share if unit.weight) for share in plan.shares]
    # Allocate before the next message, because after it every rank must join the collective.
    buffers = None if outputs.kinds is None else make_gather_buffers(outputs.kinds, sizes, world)
    # Over the control plane (the process group for messages), so that a rank without samples can take part, and a
    # mismatch raises an error. Compare the checksums of the step too: rows of different batches must not be combined.
    digests = () if world.call_tracker is None else world.call_tracker.digests
    messages = world.gather_objects((outputs.kinds, outputs.differentiable, digests))
    if _OUT_OF_MEMORY in messages:
        raise StepAbortedError
    _compare([message[2] for message in messages])
    on_exchange()
    with_outputs = [message for message in messages if message[0] is not None]
    kinds = with_outputs[0][0]
    for other, *_ in with_outputs:
        _check_same_kinds(kinds, other, "on one rank and on another")
    if buffers is None and world.size > 1:  # a rank without micro-batches receives the shapes only now
        try:
            buffers = make_gather_buffers(kinds, sizes, world)
        except torch.OutOfMemoryError as error:
            message = "out of memory for the outputs of all ranks, which other ranks are already sending"
            raise CannotRedoError(message, rank=world.rank, phase="forward_backward") from error
    tensors = gather_rows(outputs.pieces, kinds, sizes, world, collective, buffers=buffers)
    # An output that requires a gradient on some ranks requires it on all, because all ranks must run the same backward.
    return tensors, tuple(map(any, zip(*(flags for _, flags, _ in with_outputs), strict=True)))


def _compare(digests: Sequence[tuple[int, ...]]) -> None:
    """Raise a `StepsDifferError` if ranks run different steps."""
    if differing := tuple(number for number, row in enumerate(zip(*digests, strict=True)) if len(set(row)) > 1):
        raise StepsDifferError(differing)


def first_rank_with_samples(plan: BatchPlan) -> int:
    """Return the first rank with samples in its share."""
    return next(rank for rank, share in enumerate(plan.shares) if any(unit.weight for unit in share))


def call_on_whole(context: LoopContext, loss: Loss, outputs: Batch, seed: int) -> object:
    """Return the result of the loss function for the outputs of a whole effective batch."""
    # Every rank computes the whole loss, so all ranks must draw the same random numbers.
    context.randomness.seed_effective_batch(seed)
    with context.strategy.micro_batch(_NOT_LAST), context.autocast():
        return context.prepared.call(loss.function, outputs)


def one_number(value: object) -> torch.Tensor:
    """Return the value of a loss across samples, after a check that it is a scalar tensor."""
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


def _record_outputs(outputs: Outputs, micro_batch: MicroBatch) -> None:
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
    _check_same_kinds(outputs.kinds or kinds, kinds, "for one micro-batch and for another")
    before = outputs.differentiable or (False,) * len(tensors)
    outputs.kinds = kinds
    outputs.differentiable = tuple(flag or tensor.requires_grad for flag, tensor in zip(before, tensors, strict=True))
    if micro_batch.unit.weight:  # copies, because a view would keep its base alive
        outputs.pieces.append([tensor.detach().clone() for tensor in tensors])


def _check_same_kinds(first: tuple[RowLayout, ...], other: tuple[RowLayout, ...], where: str) -> None:
    if first == other:
        return
    shapes = [", ".join(f"{('samples', *kind.shape)} of {kind.dtype}" for kind in kinds) for kinds in (first, other)]
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
    # The graph of the loss begins at the outputs; the second pass builds the encoder's graphs again.
    leaves = [tensor.requires_grad_(flag) for tensor, flag in zip(tensors, differentiable, strict=True)]
    whole = _in_batch_order(leaves, exchange.plan)
    value = one_number(call_on_whole(context, context.loss, outputs.rebuild(whole), exchange.seed))
    differentiated = [leaf for leaf in leaves if leaf.requires_grad]
    parameters, num_outputs = context.prepared.leaves, len(differentiated)
    gradients: Sequence[torch.Tensor | None] = []
    if value.requires_grad:
        # Not `backward`, which would add to `.grad` and start reductions before the last micro-batch.
        gradients = torch.autograd.grad(context.scaler.scale(value), [*differentiated, *parameters], allow_unused=True)
    if all(gradient is None for gradient in gradients[:num_outputs]):
        message = (
            "the function of ab.joint does not depend on any output of encode that requires a gradient, so the encoder "
            "would not be trained. Use the outputs that the function receives, and do not detach them."
        )
        raise LossError(message)
    of_outputs = iter(gradients[:num_outputs])
    used = [(p, g) for p, g in zip(parameters, gradients[num_outputs:], strict=True) if g is not None]
    return LossGradient(
        value.detach(),
        tuple(next(of_outputs) if leaf.requires_grad else None for leaf in leaves),
        tuple(parameter for parameter, _ in used),
        tuple(gradient if exchange.reports_loss else torch.zeros_like(gradient) for _, gradient in used),
    )


def _in_batch_order(tensors: Sequence[torch.Tensor], plan: BatchPlan) -> list[torch.Tensor]:
    """Return tensors of a whole effective batch with their rows in the order of the batch; differentiable."""
    if plan.order is None:
        return list(tensors)
    # Row k has the sample at position order[k]; the inverse permutation moves it to this position.
    inverse = torch.tensor(plan.order).argsort()
    return [tensor[inverse.to(tensor.device)] for tensor in tensors]


def _backward_kept(
    context: LoopContext, micro_batch: MicroBatch, turn: Turn, outputs: Outputs, loss_gradient: LossGradient
) -> None:
    """Run the backward of the kept graph, and free it."""
    before, after = context.callbacks()
    for callback in before:
        callback(micro_batch)
    with context.strategy.micro_batch(replace(turn, backward_only=True)):
        pairs = zip(outputs.graph, loss_gradient.of_outputs, strict=True)
        roots = [root for root, gradient in pairs if gradient is not None]
        outputs.graph = []
        # Parameters of the loss function are part of the last backward, so that their reduction starts in it.
        _backward(context, micro_batch, [*roots, *(loss_gradient.parameters if turn.last else ())], loss_gradient)
    for observe in after:
        observe(micro_batch, ())


def _replay(
    context: LoopContext,
    second_pass: Iterable[tuple[MicroBatch, HostDraws | None, Turn, Batch]],
    loss_gradient: LossGradient,
) -> None:
    """Encode micro-batches again, and run the backward of each after its forward."""
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
    for micro_batch, draws, turn, batch in second_pass:
        for callback in before:
            callback(micro_batch)
        if draws is not None:
            draws.restore()
        with context.randomness.micro_batch(micro_batch), context.strategy.micro_batch(turn):
            with context.autocast():
                roots = context.prepared.call(run_last if turn.last and in_forward else run, batch)
            if turn.last and not in_forward:
                roots = [*roots, *loss_gradient.parameters]
            _backward(context, micro_batch, roots, loss_gradient)
            del roots  # free the graph before the next forward
        for observe in after:
            observe(micro_batch, ())


def _backward(
    context: LoopContext, micro_batch: MicroBatch, roots: Sequence[torch.Tensor], loss_gradient: LossGradient
) -> None:
    """Run one backward from the outputs of a micro-batch and, in the last backward, the loss function's parameters."""
    unit = micro_batch.unit
    rows = [gradient[unit.start : unit.stop] for gradient in loss_gradient.of_outputs if gradient is not None]
    if not unit.weight:  # a filler, which keeps ranks in lockstep and must add nothing
        rows = [torch.zeros_like(row) for row in rows]
    if len(roots) > len(rows):
        rows += loss_gradient.of_parameters
    pairs = [(root, row) for root, row in zip(roots, rows, strict=True) if root.requires_grad]
    torch.autograd.backward(
        [root for root, _ in pairs], [row for _, row in pairs], inputs=context.prepared.backward_inputs
    )


@dataclass(eq=False, repr=False)
class TwoPasses:
    """Runs the steps of a loss across samples. `leave` aborts a step after ranks have exchanged their outputs."""

    context: LoopContext
    modules: nn.Module
    world: World
    notifier: Notifier
    batch_norm: BatchNormRunner
    leave: Callable[[], None]
    # Determines the collective in which the other ranks wait when this rank aborts.
    has_exchanged: bool = field(default=False, init=False)

    def __call__(self, counted: CountedBatch) -> Sums:
        """Encode all micro-batches, gather the outputs, and encode again with the gradient of the loss."""
        plan = counted.planned.plan
        exchange = OutputExchange(
            gather=lambda outputs: gather_outputs(
                outputs, plan, self.world, self.notifier.gathering, self._set_exchanged
            ),
            plan=plan,
            # Every rank computes the whole loss, and contributions are summed over ranks, so only one rank reports it.
            reports_loss=first_rank_with_samples(plan) == self.world.rank,
            seed=counted.seed,
        )
        is_observed = bool(self.notifier.observers)
        micro_batches = self.notifier.timed(counted.micro_batches) if is_observed else counted.micro_batches
        with self.batch_norm.two_passes() as record:
            return accumulate_in_two_passes(
                self.context, self.modules, micro_batches, counted.replay, exchange, record=record
            )

    def abort(self) -> None:
        """Abort the step, before or after the exchange of outputs."""
        if self.has_exchanged:
            self.leave()
        else:
            self.world.gather_objects(_OUT_OF_MEMORY)

    def _set_exchanged(self) -> None:
        self.has_exchanged = True
