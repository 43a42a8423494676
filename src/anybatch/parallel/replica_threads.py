"""The scheme of `nn.DataParallel` on a CPU: a thread for each replica, with gradients summed in the first one.

In each call the module is replicated and every replica runs its part of the samples in a thread. Torch has a backward
thread for each accelerator, but only one for the CPU; so each replica has a separate graph here, and all of them run
their backwards in threads too.
"""

import contextvars
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from anybatch.core.dtypes import accumulation_dtype
from anybatch.core.tree import map_leaves
from anybatch.errors import CompositionError
from anybatch.parallel.replica_calls import CutCall
from anybatch.parallel.torch_internals import has_thread_state, keeps_graph, replica_of

Gradient = torch.Tensor | None


@dataclass(slots=True)
class _Branch:
    """One replica's part of a call.

    Attributes:
        copies: its own parameters by the id of the module's; empty for the first, which is the module itself.
        inputs: by the id of an argument that takes a gradient, the replica's slice of it.
        output: its output.
    """

    copies: dict[int, nn.Parameter]
    inputs: dict[int, torch.Tensor]
    output: Any = None


class ThreadedReplicas:
    """Runs calls of a module in parts, each by a replica in its own thread.

    Replicas run one after another in the calling thread instead if the module draws random numbers, because all threads
    share one generator, or if torch runs in a mode that new threads would not have.

    Args:
        module: serves as the first replica: its buffers and attributes change in the forward, other replicas' are
            dropped.
        parameters: all trainable parameters, also of other modules.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._module = module
        self._parameters = tuple(parameters)

    def __call__(self, call: CutCall) -> Any:  # noqa: ANN401 (the model's output)
        """Return the result of the whole call.

        Raises:
            CompositionError: outputs cannot be joined; or random numbers were drawn in threads.
            Exception: a replica's error, with a note that names the replica.
        """
        in_turns = call.form.draws is not False or has_thread_state()
        branches = [self._branch(call, number) for number in range(len(call.ranges))]
        before = torch.default_generator.get_state()
        run_each([run for run, _ in branches], call.ranges, in_turns=in_turns, grad=torch.is_grad_enabled())
        has_drawn = not torch.equal(before, torch.default_generator.get_state())
        if has_drawn and not in_turns:
            raise CompositionError(_DRAWN)
        call.form.draws = bool(call.form.draws) or has_drawn
        return self._joined(call, [branch for _, branch in branches], in_turns=in_turns)

    def _branch(self, call: CutCall, number: int) -> tuple[Callable[[], None], _Branch]:
        """Return a function that runs one part, and the record of its output."""
        with_graph = torch.is_grad_enabled()
        module, branch = self._module, _Branch({}, {})
        if number:
            branch.copies = {
                id(own): nn.Parameter(own.detach().clone(), requires_grad=own.requires_grad and with_graph)
                for own in module.parameters()
            }
            module = replica_of(module, branch.copies)

        def own_leaf(tensor: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
            if not (of.requires_grad and with_graph):
                return tensor
            branch.inputs[id(of)] = tensor.detach().requires_grad_()
            return branch.inputs[id(of)]

        positional, named = call.part(number, own_leaf)

        def run() -> None:
            branch.output = module(*positional, **named)

        return run, branch

    def _joined(self, call: CutCall, branches: Sequence[_Branch], *, in_turns: bool) -> Any:  # noqa: ANN401 (the model's)
        parts: dict[int, tuple[torch.Tensor, ...]] = {}
        whole: list[torch.Tensor] = []

        def join_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            joined = torch.cat([one.detach() for one in tensors])
            if any(one.requires_grad for one in tensors):
                parts[id(joined)] = tuple(tensors)
                whole.append(joined)
            return joined

        output = call.join([branch.output for branch in branches], join_rows)
        if not whole:
            return output
        inputs = [tensor for tensor in call.tensors() if tensor.requires_grad]
        graph = _Graph(call, branches, [parts[id(one)] for one in whole], self._parameters, inputs, in_turns=in_turns)
        results = _Joined.apply(graph, tuple(whole), *self._parameters, *inputs)  # type: ignore[no-untyped-call]  # torch's
        connected = {id(one): result for one, result in zip(whole, results, strict=True)}
        return map_leaves(output, lambda leaf: connected.get(id(leaf), leaf))


class _Graph:
    """The graphs of all replicas that produced the joined outputs."""

    def __init__(
        self,
        call: CutCall,
        branches: Sequence[_Branch],
        outputs: Sequence[tuple[torch.Tensor, ...]],
        parameters: Sequence[nn.Parameter],
        inputs: Sequence[torch.Tensor],
        *,
        in_turns: bool,
    ) -> None:
        self._call = call
        self._branches = branches
        self._outputs = outputs
        self._parameters = parameters
        self._inputs = inputs
        self._in_turns = in_turns

    def backward(self, gradients: Sequence[Gradient], needed: Sequence[bool]) -> list[Gradient]:
        """Return the gradients of the `needed` parameters and inputs; None if no gradient has reached one."""
        found: list[list[Gradient]] = [[None] * len(needed) for _ in self._branches]
        keeps = keeps_graph()

        def job(number: int) -> Callable[[], None]:
            return lambda: self._backward_of(number, gradients, needed, found[number], keeps=keeps)

        jobs = [job(number) for number in range(len(self._branches))]
        run_each(jobs, self._call.ranges, in_turns=self._in_turns or has_thread_state(), grad=False)
        columns = list(zip(*found, strict=True))
        num_parameters = len(self._parameters)
        whole = [_sum(column) for column in columns[:num_parameters]]
        for tensor, column in zip(self._inputs, columns[num_parameters:], strict=True):
            whole.append(self._of_input(tensor, column))
        return whole

    def _backward_of(
        self, number: int, gradients: Sequence[Gradient], needed: Sequence[bool], found: list[Gradient], *, keeps: bool
    ) -> None:
        """Run the backward of one replica."""
        branch, start = self._branches[number], 0
        roots: list[torch.Tensor] = []
        own: list[torch.Tensor] = []
        for tensors, gradient in zip(self._outputs, gradients, strict=True):
            start = sum(len(one) for one in tensors[:number])
            if gradient is not None and tensors[number].requires_grad:
                roots.append(tensors[number])
                own.append(gradient[start : start + len(tensors[number])])
        # A replica may also use the module's own parameters, through a function bound to it.
        wanted: list[tuple[int, torch.Tensor]] = []
        for place, parameter in enumerate(self._parameters):
            copy = branch.copies.get(id(parameter))
            wanted += [(place, one) for one in (parameter, copy) if needed[place] and one is not None]
        for place, tensor in enumerate(self._inputs, len(self._parameters)):
            leaf = branch.inputs.get(id(tensor))
            wanted += [(place, leaf)] if needed[place] and leaf is not None else []
        if not roots or not wanted:
            return
        reached = torch.autograd.grad(
            roots, [one for _, one in wanted], own, retain_graph=keeps or None, allow_unused=True
        )
        for (place, _), gradient in zip(wanted, reached, strict=True):
            found[place] = _sum((found[place], gradient))

    def _of_input(self, tensor: torch.Tensor, gradients: Sequence[Gradient]) -> Gradient:
        if all(gradient is None for gradient in gradients):
            return None
        if not self._call.is_cut(tensor):
            return _sum(gradients)
        leaves = [branch.inputs[id(tensor)] for branch in self._branches]
        pairs = zip(gradients, leaves, strict=True)
        return torch.cat([torch.zeros_like(leaf) if gradient is None else gradient for gradient, leaf in pairs])


class _Joined(torch.autograd.Function):
    """Connects the joined outputs with the parameters and arguments of the call."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, whole: tuple[torch.Tensor, ...], *_: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ANN401 (torch's own)
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Gradient) -> tuple[Gradient, ...]:  # noqa: ANN401 (torch's own)
        # Torch's `once_differentiable` treats a gradient as a constant if its incoming gradient requires none.
        if torch.is_grad_enabled():
            raise CompositionError(_TWICE)
        return None, None, *ctx.graph.backward(gradients, ctx.needs_input_grad[2:])


def run_each(
    jobs: Sequence[Callable[[], None]], ranges: Sequence[tuple[int, int]], *, in_turns: bool, grad: bool
) -> None:
    """Run the first job in this thread and each other one in a new thread, under this thread's autocast.

    With `in_turns` all run in this thread, one after another. `ranges` (the jobs' samples) are for messages; `grad` is
    whether a graph is recorded.

    Raises:
        BaseException: the first error of a job, in the order of replicas, with its own traceback.
    """
    errors: list[BaseException | None] = [None] * len(jobs)
    enter = _contexts(grad=grad)

    def run(number: int) -> None:
        try:
            with enter():
                jobs[number]()
        except BaseException as error:  # noqa: BLE001 (raised again in the calling thread)
            errors[number] = error

    if in_turns:
        for number in range(len(jobs)):
            run(number)
            if errors[number] is not None:
                break
    else:
        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(run, number), name=f"replica {number}")
            for number in range(1, len(jobs))
        ]
        for thread in threads:
            thread.start()
        run(0)
        for thread in threads:
            thread.join()
    first = next(((number, error) for number, error in enumerate(errors) if error is not None), None)
    errors.clear()  # otherwise an error would reference itself, and keep the memory of the failed step
    if first is None:
        return
    (number, failed), first = first, None
    start, stop = ranges[number]
    failed.add_note(f"anybatch: in replica {number} of {len(jobs)}, on samples {start} to {stop - 1} of a micro-batch.")
    try:
        raise failed
    finally:
        del failed


def _contexts(*, grad: bool) -> Callable[[], ExitStack]:
    """Return a function that enters this thread's autocast and inference mode in another thread."""
    cached, inference = torch.is_autocast_cache_enabled(), torch.is_inference_mode_enabled()
    kinds = [kind for kind in dict.fromkeys(("cpu", _accelerator())) if torch.is_autocast_enabled(kind)]
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in kinds}

    def enter() -> ExitStack:
        stack = ExitStack()
        if inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind, dtype in dtypes.items():
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cached))
        return stack

    return enter


def _accelerator() -> str:
    found = torch.accelerator.current_accelerator()
    return "cpu" if found is None else found.type


def _sum(gradients: Sequence[Gradient]) -> Gradient:
    """Return the sum of the existing gradients, rounded once; None without any."""
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) <= 1:
        return present[0] if present else None
    total = present[0].to(accumulation_dtype(present[0]))
    for gradient in present[1:]:
        total = total + gradient
    return total.to(present[0].dtype)


_TWICE = (
    "strategy 'data_parallel' does not compose with gradients of gradients (create_graph=True), as of a gradient "
    "penalty: the backward of replicas in threads leaves no graph. Use strategy='all_reduce' (torchrun) or 'single'."
)
_DRAWN = (
    "strategy 'data_parallel' does not compose with this model: it has drawn random numbers from torch's generator in "
    "this call and none in the first one, and threads draw from it in an order of chance. Draw in every call, so that "
    "replicas take turns, or use strategy='all_reduce' (torchrun)."
)
