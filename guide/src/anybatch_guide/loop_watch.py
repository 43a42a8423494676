"""`LoopWatch`: observes a loop in plain PyTorch through hooks, so that the loop needs no extra lines."""

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.core.records import EndRecord, MicroBatchRecord, SpanEvent, StartRecord, StepRecord
from anybatch.errors import NonFiniteError
from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.trace import timeline
from anybatch_guide.micro_batch_view import MicroBatchView
from anybatch_guide.mistakes.windows import items
from anybatch_guide.run_metrics import RunMetrics
from anybatch_guide.setting import PlaygroundSetting
from anybatch_guide.tasks.task import cross_entropy


class _AllStepsMade(Exception):  # noqa: N818 (nothing went wrong)
    """All requested steps are done."""


class LoopWatch:
    """Emits records of a plain loop like the engine's: micro-batches, steps, and the memory of one step.

    Hooks on the model and the optimizer report the start of forwards and updates, and the criterion reports losses.
    The gradient norm is the norm in the optimizer step, after clipping if the loop clips.
    """

    def __init__(
        self,
        setting: PlaygroundSetting,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        metrics: RunMetrics,
        view: MicroBatchView,
    ) -> None:
        self.is_done = False
        self._setting, self._model, self._optimizer, self._metrics = setting, model, optimizer, metrics
        self._view = view
        self._step = self._position = self._num_samples = 0
        self._means: list[tuple[float, int]] = []
        self._open_samples: int | None = None
        self._norm: Tensor | None = None
        self._rates: tuple[float, ...] = ()
        self._ledger: MemoryLedger | None = None
        self._stack = ExitStack()

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of a micro-batch: the criterion of the loop."""
        loss = cross_entropy(outputs, targets)
        self._means.append((float(loss.detach()), items(targets)))
        return loss

    def __enter__(self) -> Self:
        """Register the hooks and report the start."""
        for handle in (
            self._model.register_forward_pre_hook(self._before_forward),
            self._optimizer.register_step_pre_hook(self._before_update),
            self._optimizer.register_step_post_hook(self._after_update),
        ):
            self._stack.callback(handle.remove)
        self._metrics.observe(self._start())
        self._record_memory()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Remove the hooks and report the end; `_AllStepsMade` does not count as an error."""
        self._stop_recording()
        self._stack.close()
        self.is_done = isinstance(error, _AllStepsMade)
        status = "completed" if self.is_done else "failed" if isinstance(error, Exception) else "stopped"
        message = None if self.is_done else f"{type(error).__name__}: {error}"
        self._metrics.observe(
            EndRecord(rank=0, status=status, num_steps=self._step, message=message, digest=None)  # type: ignore[arg-type]
        )
        # True swallows `_AllStepsMade`; any other error propagates.
        return self.is_done

    def _before_forward(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        self._end_micro_batch()
        self._open_samples = len(args[0])
        self._num_samples += len(args[0])
        if self._ledger is not None:
            self._ledger.mark(f"micro-batch {self._position + 1}")
            self._ledger.categorize("inputs", args)
        self._report_micro_batch("begin")
        self._view.begin(args[0])

    def _end_micro_batch(self) -> None:
        # PyTorch has no hook after a backward, so the next forward, or the update, ends the micro-batch.
        if self._open_samples is not None:
            self._categorize_persistent()
            self._report_micro_batch("end")
            self._position += 1
            self._open_samples = None

    def _before_update(self, *_: object) -> None:
        self._end_micro_batch()
        if self._ledger is not None:
            self._ledger.mark("update")
            self._ledger.phase = "update"
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        self._norm = torch.nn.utils.get_total_norm(gradients)
        self._rates = tuple(group["lr"] for group in self._optimizer.param_groups)

    def _after_update(self, *_: object) -> None:
        self._categorize_persistent()
        self._stop_recording()
        record = self._step_record()
        self._metrics.observe(record)
        self._metrics.after_step(self._step)
        self._step += 1
        self._position = self._num_samples = 0
        self._means.clear()
        # The engine raises the same error for such a loss.
        if not torch.isfinite(torch.tensor(record.loss)):
            message = f"the loss of step {record.step} is {record.loss}."
            raise NonFiniteError(message)
        if self._step == self._setting.steps:
            # An exception is the only way to leave the hand-written loop.
            raise _AllStepsMade
        self._record_memory()

    def _record_memory(self) -> None:
        """Record memory if the next step is the measured step."""
        if self._step == self._metrics.measured_step:
            self._ledger = MemoryLedger(device_type="cpu")
            self._ledger.phase = "setup"
            self._categorize_persistent()
            self._ledger.phase = None
            # Enter without `with`, because another hook exits the context.
            self._ledger.__enter__()

    def _stop_recording(self) -> None:
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._metrics.add_memory(timeline(ledger.trace()))
            ledger.forget()

    def _categorize_persistent(self) -> None:
        """Assign persistent tensors to their categories: weights, buffers, gradients, the optimizer's state."""
        if self._ledger is None:
            return
        states = (value for state in self._optimizer.state.values() for value in state.values())
        gradients = (parameter.grad for parameter in self._model.parameters() if parameter.grad is not None)
        self._ledger.categorize("weights", self._model.parameters())
        self._ledger.categorize("buffers", self._model.buffers())
        self._ledger.categorize("gradients", gradients)
        self._ledger.categorize("optimizer", (value for value in states if isinstance(value, Tensor)))

    def _report_micro_batch(self, event: SpanEvent) -> None:
        # The loss is known only after the forward.
        mean, count = self._means[-1] if event == "end" else (0.0, 0)
        record = MicroBatchRecord(
            rank=0,
            event=event,
            step=self._step,
            unit_number=self._position,
            position=self._position,
            num_micro_batches=self._setting.accumulation_steps,
            num_samples=self._open_samples or 0,
            first_sample_id=None,
            weight=1.0,
            counts={"loss": count} if event == "end" else {},
            loss_sums={"loss": mean * count} if event == "end" else {},
        )
        self._metrics.observe(record)
        self._view.observe(record)

    def _step_record(self) -> StepRecord:
        count = sum(num_items for _, num_items in self._means)
        loss = sum(mean * num_items for mean, num_items in self._means) / count
        return StepRecord(
            rank=0,
            step=self._step,
            epoch=0,
            sample_offset=0,
            num_samples=self._num_samples,
            num_micro_batches=self._position,
            loss=loss,
            losses={"loss": loss},
            counts={"loss": count},
            gradient_norm=self._norm,
            clipped=None,
            learning_rates=self._rates,
            skipped=False,
        )

    def _start(self) -> StartRecord:
        parameters = list(self._model.parameters())
        setting = self._setting
        size, steps = setting.micro_batch_size, setting.accumulation_steps
        return StartRecord(
            rank=0,
            world_size=1,
            first_step=0,
            geometry=f"{setting.effective_batch_size} = {size} x {steps}",
            effective_batch_size=setting.effective_batch_size,
            micro_batch_size=size,
            strategy=f"a loop in plain PyTorch: {setting.mistake}",
            precision=setting.precision,
            device="cpu",
            dtype="float32",
            seed=setting.seed,
            num_parameters=sum(parameter.numel() for parameter in parameters),
            gradient_bytes=sum(parameter.nbytes for parameter in parameters),
            versions={"torch": torch.__version__},
            decisions={},
        )
