"""The probe model and its data: the weight of each sample in a gradient can be read from the model's parameter.

The parameter is a table with one row per sample. The output for sample i is

    output_i = constant_i + gain * (table_i - stop_gradient(table_i))

The bracket is zero, so outputs never depend on the optimizer's updates, and the loss of a sample has the same gradient
in every step. The gradient of row i is gain * (weight of sample i) * d loss_i / d output_i. Rows do not mix, so the
weight of each sample can be read from the gradient, for any loss.
"""

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

TableGradient = Float64[Tensor, "sample position output"]
MAX_FORWARDS = 200
"""A loop that makes more forwards is stopped as endless; it has the 31 samples of `judged_loop`."""
TOLERANCE = 1e-5
"""Relative tolerance; rounding in float32 is smaller, and the smallest fault changes a weight by 0.1."""


class LoopStopped(BaseException):
    """Stops a loop that does not end. Not an Exception, so that loops do not catch it."""


class LastPassStopped(LoopStopped):
    """Stops a loop that begins another pass over its data after the last recorded one."""


@dataclass(slots=True, eq=False)
class Forward:
    """A micro-batch: a forward that a backward can follow."""

    ids: tuple[int, ...]
    learning_rates: tuple[float, ...]
    is_synced: bool | None  # whether DistributedDataParallel would reduce its backward; None without that wrapper
    line: int | None
    has_backward: bool = False
    has_gradient: bool = False  # whether its backward gave a gradient other than zero
    rank: int = 0
    epoch: int = 0

    @property
    def key(self) -> tuple[int, int, tuple[int, ...]]:
        """The rank, epoch and samples: equal for further forwards of the same micro-batch."""
        return self.rank, self.epoch, self.ids


@dataclass(slots=True)
class RankStep:
    """An optimizer step on one rank."""

    gradient: TableGradient = field(default_factory=lambda: torch.zeros(0))  # used by the optimizer
    forwards: set[int] = field(default_factory=set)  # indices of forwards whose backward ran since the previous step
    num_forwards: int = 0  # number of forwards before this step, from the start of the loop
    num_reductions: int = 0  # by DistributedDataParallel, since the previous step
    is_stale: bool = False  # the first backward was added to an old gradient, which was not cleared later
    is_accumulated: bool = False  # backwards added to .grad; otherwise the loop adds up gradients itself
    line: int | None = None


@dataclass(slots=True)
class LoopTrace:
    """The actions of a loop on one rank, in order."""

    forwards: list[Forward] = field(default_factory=list)
    steps: list[RankStep] = field(default_factory=list)
    backward_line: int | None = None  # of the first backward
    output_gradients: dict[int, Tensor] = field(default_factory=dict)  # sample -> gradient in its first forward
    changed_lines: list[int | None] = field(default_factory=list)  # backwards before which .grad was changed
    changed_after_lines: list[int | None] = field(default_factory=list)  # steps after which .grad was changed
    call_ends: list[int] = field(default_factory=list)  # number of forwards at the end of each call
    ended: bool = True  # False if the loop was stopped within a recorded pass
    has_more_passes: bool = False  # whether the loop began a pass after the last recorded one
    guesses: dict[str, Any] = field(default_factory=dict)  # guessed values of unknown settings


class Recorder:
    """Records a loop between `watch` and the end of the context, and stops it after `num_passes` over the loader."""

    def __init__(self, file: str | None, gain: float, num_passes: int = 2) -> None:
        self.trace = LoopTrace()
        self._file, self._gain, self._num_passes = file, gain, num_passes
        self._step = RankStep()  # the next step
        self._pass, self._finished, self._trained = 0, set[int](), set[int]()
        self._in_closure = False
        self._optimizers: list[Optimizer] = []
        self._handles: list[Any] = []
        self._incoming = self._sum = torch.zeros(0)  # gradient of the current backward, and .grad after the last one
        self._used: tuple[Tensor, TableGradient] | None = None  # .grad at the last step, and a copy of it
        self._wrapper: DistributedDataParallel | None = None

    def watch(self, table: nn.Parameter, optimizers: Sequence[Optimizer]) -> None:
        """Start to record the gradients of `table`; optimizers that the loop makes are found at their first step."""
        self._table, self._optimizers = table, list(optimizers)
        self._handles = [
            table.register_hook(self._receive),
            table.register_post_accumulate_grad_hook(self._accumulate),
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
            register_module_forward_pre_hook(self._find_wrapper),
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        for handle in self._handles:
            handle.remove()
        self._compare_with_used()
        self.trace.ended = kind is not LoopStopped
        self.trace.has_more_passes = kind is LastPassStopped
        return isinstance(error, LoopStopped)  # suppressed, because its trace is a valid result

    def one_pass(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a pass over the loader, and record its beginning and end."""
        self._pass = number = self._pass + 1
        yield from batches
        self._finished.add(number)

    def forward(self, ids: Sequence[int], outputs: Tensor, shape: Sequence[int]) -> None:
        """Record a forward, and the gradient of its outputs, which have this shape for each sample."""
        if self._in_closure and tuple(ids) in {self.trace.forwards[number].ids for number in self._step.forwards}:
            return  # a line search computes the same gradient again
        self._compare_with_used()
        if self._pass not in self._trained and len(self._trained & self._finished) >= self._num_passes:
            raise LastPassStopped
        self._trained.add(self._pass)
        if len(self.trace.forwards) >= MAX_FORWARDS:
            raise LoopStopped
        number = len(self.trace.forwards)
        rates = tuple(float(group["lr"]) for optimizer in self._optimizers for group in optimizer.param_groups)
        forward = Forward(tuple(ids), rates, self._is_synced(), self._line())
        self.trace.forwards.append(forward)

        def receive(gradient: Tensor) -> None:
            self._step.forwards.add(number)
            forward.has_backward, forward.has_gradient = True, forward.has_gradient or bool(gradient.any())
            self.trace.backward_line = self.trace.backward_line or self._line()
            rows = gradient.detach().double().cpu().reshape(len(ids), *shape)
            for sample, row in zip(ids, rows, strict=True):
                self.trace.output_gradients.setdefault(sample, row)

        outputs.register_hook(receive)

    def _receive(self, gradient: Tensor) -> None:
        self._incoming = self._unscaled(gradient)

    def _accumulate(self, _: Tensor) -> None:
        """Record a backward whose gradient was added to .grad, and not reduced yet."""
        gradient = self._gradient()
        before = gradient - self._incoming
        # Old gradients are harmless if they are cleared before the step.
        self._step.is_stale = bool(before.any()) and (self._step.is_stale or not self._step.is_accumulated)
        self._step.is_accumulated = True
        # DistributedDataParallel decides in the forward whether it reduces the backward.
        self._step.num_reductions += any(forward.is_synced for forward in self.trace.forwards[-1:])
        if self._sum.any() and before.any() and not is_close(before, self._sum):
            self.trace.changed_lines.append(self._line())
        self._sum = gradient

    def _has_table(self, optimizer: Optimizer) -> bool:
        return any(parameter is self._table for group in optimizer.param_groups for parameter in group["params"])

    def _begin_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._has_table(optimizer):  # the hook is called for every optimizer of the process
            return
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        self._in_closure = any(callable(value) for value in (*args[1:], *kwargs.values()))
        if not self._in_closure:
            self._record_step()

    def _end_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._has_table(optimizer):
            if self._in_closure:  # the closure has computed the gradient by now
                self._record_step()
            self._in_closure = False
            self._used = None if self._table.grad is None else (self._table.grad, self._gradient())

    def _record_step(self) -> None:
        step, self._step, self._sum = self._step, RankStep(), torch.zeros(0)
        step.gradient, step.num_forwards, step.line = self._gradient(), len(self.trace.forwards), self._line()
        self.trace.steps.append(step)

    def _compare_with_used(self) -> None:
        """Record the line of the last step if its gradient was changed afterwards, other than by clearing it."""
        if self._used is not None:
            gradient = self._unscaled(self._used[0])
            if gradient.any() and not is_close(gradient, self._used[1]):
                self.trace.changed_after_lines.append(self.trace.steps[-1].line)
        self._used = None

    def _find_wrapper(self, module: nn.Module, *_: object) -> None:
        if isinstance(module, DistributedDataParallel) and self._table in set(module.parameters()):
            self._wrapper = module

    def _is_synced(self) -> bool | None:
        return None if self._wrapper is None else bool(self._wrapper.require_backward_grad_sync)

    def _gradient(self) -> TableGradient:
        gradient = self._table.grad
        return self._unscaled(torch.zeros_like(self._table) if gradient is None else gradient)

    def _unscaled(self, gradient: Tensor) -> TableGradient:
        return gradient.detach().to_dense().to("cpu", torch.float64, copy=True) / self._gain

    def _line(self) -> int | None:
        """Return the current line in the user's file; None if the file is not on the stack."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename != self._file:
            frame = frame.f_back
        return None if frame is None else frame.f_lineno


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Return whether two gradients are equal up to rounding."""
    return float((found - expected).norm()) <= TOLERANCE * float(expected.norm())


def near(found: float, expected: float) -> bool:
    """Return whether two numbers are equal up to rounding."""
    return abs(found - expected) <= TOLERANCE * max(abs(found), abs(expected))


TargetKind = Literal["classes", "tokens", "values", "scores"]
TARGET_KINDS: tuple[TargetKind, ...] = get_args(TargetKind)
NUM_ROWS = 32
_NUM_OUTPUTS, _NUM_POSITIONS, _IGNORED = 5, 6, -100
_MIN_PEAK = 5.0  # the ratio of maximum to mean of an input, also if it is mixed or noisy, but not of noise alone
_TARGET_NAMES = frozenset({"label", "labels", "target", "targets", "y", "lm_labels", "tgt"})
_ABSENT_NAMES = frozenset({"edge_index", "edge_attr", "edge_weight", "batch", "pos", "weight", "mask", "lengths"})
"""Attributes of graph batches that are None in a `ProbeBatch`."""


@dataclass(frozen=True, slots=True)
class ProbeData:
    """Samples: inputs that identify them, their targets, and the model's outputs for them.

    The kind is "classes" (one class per sample), "values" (one number per output), "scores" (0 or 1 per sample, for
    the only output, which is between 0 and 1) or "tokens" (one class per position; the number of masked positions
    varies between samples). `latest` are the samples of the loader's latest batch.
    """

    kind: TargetKind
    inputs: Shaped[Tensor, "sample ..."]
    targets: Shaped[Tensor, "sample ..."]
    outputs: Float[Tensor, "sample position output"]
    latest: list[int] = field(default_factory=lambda: [*range(NUM_ROWS)])

    def ids(self, inputs: Tensor) -> Tensor:
        """Return the samples with these inputs, or with these outputs of another model; the latest ones for noise."""
        rows, outputs = inputs.detach().flatten(1).double(), self.outputs.flatten(1).double()
        if rows.shape[1] == outputs.shape[1]:
            return torch.cdist(rows, outputs).argmin(1)
        if rows.shape[1] == _NUM_POSITIONS:
            return inputs[:, 0].long() // _NUM_POSITIONS
        if float((rows.amax(1) / rows.abs().mean(1)).mean()) > _MIN_PEAK:
            return rows.argmax(1)
        return torch.tensor([self.latest[number % len(self.latest)] for number in range(len(rows))])


def make_data(kind: TargetKind, *, is_padded: bool = True, dtype: torch.dtype = torch.float64) -> ProbeData:
    """Return the samples of a kind, the same in each call; unless `is_padded`, no targets are masked."""
    generator = torch.Generator().manual_seed(5)
    num_positions = _NUM_POSITIONS if kind == "tokens" else 1
    outputs = torch.randn(NUM_ROWS, num_positions, _NUM_OUTPUTS, generator=generator, dtype=torch.float64).to(dtype)
    # One-hot, so that a sample can be recognised under noise or when mixed with another one.
    inputs = 100.0 * torch.eye(NUM_ROWS, dtype=dtype)
    if kind == "scores":
        targets = torch.randint(2, (NUM_ROWS,), generator=generator).to(dtype)
        return ProbeData(kind, inputs, targets, outputs[..., :1].sigmoid())
    if kind == "values":
        targets = torch.rand(NUM_ROWS, _NUM_OUTPUTS, generator=generator, dtype=torch.float64).to(dtype)
        return ProbeData(kind, inputs, targets, outputs)
    targets = torch.randint(_NUM_OUTPUTS, (NUM_ROWS, num_positions), generator=generator)
    if kind == "classes":
        return ProbeData(kind, inputs, targets.squeeze(1), outputs)
    # Every token occurs once in the data, so the first one identifies the sample.
    tokens = torch.arange(NUM_ROWS * num_positions).view(NUM_ROWS, num_positions)
    # The first position has no target, so that shifting the labels loses none; the second always has one.
    lengths, positions = torch.randint(2, num_positions + 1, (NUM_ROWS, 1), generator=generator), tokens[0]
    is_masked = (positions >= lengths) | (positions == 0)
    return ProbeData(kind, tokens, targets.masked_fill(is_masked & is_padded, _IGNORED), outputs)


class RowModel(nn.Module):
    """The probe model, which finds the inputs among its arguments; if it finds labels, it also returns a loss.

    It returns `num_outputs` values: its outputs, and their means. It keeps its last loss.
    """

    def __init__(self, data: ProbeData, gain: float, recorder: Recorder, num_outputs: int, *, is_watched: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros_like(data.outputs))
        self._data, self._gain, self._recorder, self._num_outputs = data, gain, recorder, num_outputs
        # Another model has other outputs, which are nearest to those of the same sample: a student imitates a teacher.
        self._outputs = torch.lerp(data.outputs, data.outputs.flip(-1), 0.0 if is_watched else 0.1)
        self.gain_of_made = 1.0  # if another model made the inputs: real and made samples shall not cancel in a critic

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (state that models keep)
        if re.fullmatch(r"(last_)?loss", name) and "_kept" in vars(self):
            return self._kept
        if re.fullmatch(r"(init|get|reset)_(hidden|state|memory)\w*", name):
            return lambda *_args, **_options: torch.zeros(2, 1, 1)
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (called as the user's loop calls its model)
        """Return one row of outputs per sample, or a `ModelOutput` if there are labels among the arguments."""
        labels = next((value for name, value in kwargs.items() if name in _TARGET_NAMES), None)
        given = [*args, *(value for name, value in kwargs.items() if name not in _TARGET_NAMES)]
        if len(given) == 1 and isinstance(given[0], dict):  # the batch as one argument
            labels, given = given[0]["labels"], [given[0]["inputs"]]
        tensors = [value for value in given if isinstance(value, Tensor) and value.dim()]
        inputs = next((value for value in tensors if value.dim() > 1), None)
        if inputs is None:  # the scores of another model
            inputs = next((value[:, None] for value in tensors if value.is_floating_point()), None)
        if inputs is None:
            message = f"the model was called without inputs: {[type(value).__name__ for value in given]}"
            raise TypeError(message)
        ids, shape = self._data.ids(inputs), self._data.outputs.shape[1:]
        rows, targets = self.table[ids], self._data.targets[ids]
        is_made = inputs[0].numel() == rows[0].numel()
        gain = self._gain * (self.gain_of_made if is_made else 1.0)
        outputs = self._outputs.to(rows)[ids] + gain * (rows - rows.detach())
        if inputs.requires_grad:  # the gradient passes through to the model that made the inputs
            passed = inputs - inputs.detach()
            outputs = outputs + (passed.reshape(rows.shape) if is_made else passed.flatten(1).sum(1)[:, None, None])
        outputs = outputs.reshape(targets.shape if self._data.kind == "scores" else (-1, *shape[shape[0] == 1 :]))
        if outputs.requires_grad:  # otherwise it is an evaluation
            self._recorder.forward(ids.tolist(), outputs, shape)
        is_first = labels is not None
        if not is_first and any(v.shape == targets.shape and bool((v == targets).all()) for v in tensors):
            labels = targets  # for models that accept targets by position
        if labels is not None:
            self._kept = loss = self._loss(outputs, labels, kwargs.get("num_items_in_batch"))
            output = ModelOutput((loss, outputs) if is_first else (outputs, loss))
            output.loss, output.logits = loss, outputs
            return output
        extra = outputs.reshape(len(ids), -1).mean(1, keepdim=True)
        return outputs if self._num_outputs == 1 else (outputs, *[extra] * (self._num_outputs - 1))

    def _loss(self, outputs: Tensor, targets: Tensor, num_items: Tensor | float | None) -> Tensor:
        """Return a mean over unmasked targets, or their sum divided by `num_items`."""
        if outputs.shape == self._data.targets[: len(outputs)].shape:
            return F.mse_loss(outputs, targets)
        reduction = "mean" if num_items is None else "sum"
        loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=_IGNORED, reduction=reduction)
        return loss if num_items is None else loss / num_items


class ModelOutput(tuple[Tensor, Tensor]):  # noqa: SLOT001 (it has attributes)
    """The loss and logits of a model, accessed by name, by index, by unpacking, or as a tensor (the logits)."""

    loss: Tensor
    logits: Tensor

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 (a name, a number or an index of a tensor)
        if isinstance(key, str):
            return self.loss if "loss" in key else self.logits
        return super().__getitem__(key) if isinstance(key, int | slice) else self.logits[key]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (an attribute of a tensor)
        return getattr(self.loss if name in {"backward", "item"} else self.logits, name)

    def __truediv__(self, divisor: Any) -> Tensor:  # noqa: ANN401 (a number or tensor)
        return torch.div(self.loss, divisor)

    def values(self) -> tuple[Tensor, ...]:
        """Return the losses, as for a model that returns a dict of losses in training."""
        return (self.loss,)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 (the function's result)
        """Use the logits as the tensor."""
        tensors = [value.logits if isinstance(value, cls) else value for value in args]
        return func(*tensors, **(kwargs or {}))


class ProbeBatch(dict[str, Any]):
    """A batch that can be unpacked as a pair, and that has nearly any key and attribute."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __missing__(self, key: object) -> Any:  # noqa: ANN401 (as a dict)
        inputs, targets = self.values()
        if isinstance(key, int):
            return (inputs, targets)[key]
        if key == "attention_mask":
            return torch.ones_like(inputs)
        if key in {"net_input", "inputs_dict"}:  # the model's arguments, in a nested dict
            return {next(iter(self.keys())): inputs}
        return targets if key in _TARGET_NAMES else inputs

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (as a batch of graphs or sentences)
        if name.startswith("_"):
            raise AttributeError(name)
        if name in {"batch_size", "num_graphs", "nsentences"}:
            return len(self["labels"])
        if name == "cuda":
            return lambda *_args, **_options: self
        return None if name in _ABSENT_NAMES else self[name]

    def to(self, *args: Any, **kwargs: Any) -> Self:  # noqa: ANN401 (arguments of Tensor.to)
        """Return the batch on another device or in another data type."""
        return type(self)({name: value.to(*args, **kwargs) for name, value in self.items()})


class ProbeLoader(DataLoader[Any]):
    """A loader of `ProbeBatch` that records its passes, and can also return one batch at a time."""

    def __init__(self, data: ProbeData, ids: Sequence[int], micro_batch_size: int, recorder: Recorder) -> None:
        self._input_name = "input_ids" if data.kind == "tokens" else "inputs"
        self._recorder, self._data = recorder, data
        samples = TensorDataset(data.inputs[list(ids)], data.targets[list(ids)])
        super().__init__(samples, batch_size=micro_batch_size, collate_fn=self._collate)
        passes = (batch for _ in itertools.count() for batch in self)
        self._endless = (batch for batch in passes if len(batch["labels"]) == micro_batch_size)

    def __iter__(self) -> Any:  # noqa: ANN401 (an iterator of torch's own class)
        return self._recorder.one_pass(super().__iter__())

    def next_batch(self, *_: object, **_options: object) -> Any:  # noqa: ANN401 (a batch)
        """Return the next micro-batch of full size; the data repeat endlessly."""
        return next(self._endless)

    get_batch = get_next_batch = next_batch

    def _collate(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> ProbeBatch:
        inputs, targets = map(torch.stack, zip(*pairs, strict=True))
        self._data.latest[:] = self._data.ids(inputs).tolist()
        return ProbeBatch({self._input_name: inputs, "labels": targets})
