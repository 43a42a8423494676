"""`ab.check(trainer)`: the gradients of a Trainer's first steps, compared with one batch of all samples of each step.

A deep copy of the trainer trains for two steps that update nothing, alone and after `ab.exact`. Only public names of
transformers' `Trainer` are used, and `native_amp` of Accelerate.
"""

import contextlib
import copy
import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anybatch.core.tensors import Gradients, errors_by_parameter, relative_error
from anybatch.core.torch_internals import BatchNormBase
from anybatch.core.tree import map_tensors, tensors_of
from anybatch.data.random_state import preserved_random_state
from anybatch.diagnostics.check_report import TOLERANCES, CheckFinding, CheckReport, SplitResult, verdict_of
from anybatch.diagnostics.loop_check.probe import LoopStopped
from anybatch.engine.loss_check.fixed_draws import FixedDraws
from anybatch.errors import AnyBatchWarning, UserError
from anybatch.integrations import exact

WEIGHT_TOLERANCE = 1e-3
MAX_NUMBERS = 1_000_000  # of each gradient, to compute the weights of micro-batches
NEVER = dict.fromkeys(("save_strategy", "eval_strategy", "logging_strategy"), "no")
OFF = dict.fromkeys(("eval_on_start", "load_best_model_at_end", "push_to_hub", "torch_compile"), False)
NO_WORKERS = {"dataloader_num_workers": 0, "dataloader_persistent_workers": False, "dataloader_prefetch_factor": None}
LIMITS = {"disable_tqdm": True, "max_grad_norm": 0.0, "num_train_epochs": 1, "max_steps": -1}
ADVICE = {
    "batch_norm": ("BatchNorm uses the statistics of each micro-batch.", "use one micro-batch per step, or GroupNorm."),
    "couples_samples": ("The loss compares samples, or uses padding.", "use one micro-batch per step, or Joint."),
    "unexplained": ("It is changed between the backward and the update.", "look at training_step and callbacks."),
}


class _Step(NamedTuple):
    """One optimizer step: its micro-batches, the samples of each, the divisor, and the gradient."""

    batches: list[Any]
    samples: list[list[Any]]
    num_items: Any
    gradient: Gradients


class _Collator:
    """Collates as the trainer does, with floating-point numbers in one dtype, and keeps samples and batches."""

    def __init__(self, collate: Callable[[list[Any]], Any], dtype: torch.dtype) -> None:
        self._collate, self._dtype = collate, dtype
        self.kept: list[tuple[list[Any], Any]] = []

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (any attribute of the trainer's own collator)
        return getattr(self._collate, name)

    def __call__(self, samples: list[Any]) -> Any:  # noqa: ANN401 (any batch)
        kept = list(map(copy.copy, samples))  # some collators remove labels from the samples
        batch = map_tensors(self._collate(samples), lambda t: t.to(self._dtype) if t.is_floating_point() else t)
        self.kept.append((kept, batch))
        return batch

    def samples_of(self, batch: Any) -> list[Any]:  # noqa: ANN401
        """Return the samples of a batch, which may have been moved to a device."""
        same = [samples for samples, kept in self.kept if _same(kept, batch)]
        if not same:
            message = "the trainer changes or generates its batches, so that their samples are unknown"
            raise UserError(message, code="unknown_samples")
        return same[0]


class _Twin:
    """A copy of a trainer that makes at most two steps, which update nothing, and records them."""

    def __init__(self, trainer: Any, dtype: torch.dtype | None) -> None:  # noqa: ANN401 (optional package)
        self.trainer = twin = _copied(trainer)
        for module in [value for value in vars(twin).values() if isinstance(value, nn.Module)]:
            module.to(dtype)
        self.model: nn.Module = twin.model
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.dtype = self.loss_dtype = next(iter(self.parameters.values())).dtype
        self.collator = twin.data_collator = _Collator(twin.data_collator, self.dtype)
        self._compute_loss, twin.compute_loss = twin.compute_loss, self._record
        twin.optimizer = torch.optim.SGD(self.parameters.values(), lr=0.0)
        twin.optimizer.register_step_pre_hook(self._end_step)
        self.steps: list[_Step] = []
        self._losses: list[tuple[Any, Any]] = []

    def _record(self, model: nn.Module, inputs: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        if torch.is_grad_enabled() and model.training:
            self._losses.append((copy.copy(inputs), options.get("num_items_in_batch")))
        return self._compute_loss(model, inputs, *args, **options)

    def _end_step(self, *_: object) -> None:
        batches, num_items = [batch for batch, _ in self._losses], self._losses[-1][1]
        self.steps.append(_Step(batches, list(map(self.collator.samples_of, batches)), num_items, self._gradients()))
        self._losses = []

    def _gradients(self) -> Gradients:
        return {name: None if p.grad is None else p.grad.clone() for name, p in self.parameters.items()}

    def _gradient(self, batch: Any) -> Gradients:  # noqa: ANN401
        self.model.zero_grad()
        loss = self._compute_loss(self.model, map_tensors(batch, lambda t: t.to(self.trainer.args.device)))
        self.loss_dtype = loss.dtype
        loss.backward()
        return self._gradients()

    def unsplit_gradient(self, step: _Step) -> Gradients:
        """Return the gradient of all samples of a step in one forward and backward, without the trainer's divisor."""
        if not _same(self.collator(list(map(copy.copy, step.samples[0]))), step.batches[0]):
            message = "the collate function returns another batch for the same samples: let it draw no random numbers"
            raise UserError(message, code="random_collate")
        return self._gradient(self.collator([copy.copy(sample) for part in step.samples for sample in part]))

    def weights(self, step: _Step, *gradients: Gradients) -> list[Tensor | None]:
        """Return the weights with which the micro-batches that have a gradient add up to each gradient, or None."""
        columns = torch.stack([self._numbers(self._gradient(batch)) for batch in step.batches], 1)
        columns = columns[:, columns.any(0)]
        solutions = []
        for gradient in map(self._numbers, gradients):
            weights = torch.linalg.lstsq(columns, gradient[:, None], driver="gelsd").solution.flatten()
            solutions.append(weights if _near(columns @ weights, gradient) else None)
        return solutions

    def _numbers(self, gradients: Gradients) -> Tensor:
        stride = math.ceil(sum(parameter.numel() for parameter in self.parameters.values()) / MAX_NUMBERS)
        dense = [torch.zeros_like(self.parameters[name]) if g is None else g for name, g in gradients.items()]
        return torch.cat([gradient.detach().flatten()[::stride] for gradient in dense]).double().cpu()


def _same(one: Any, other: Any) -> bool:  # noqa: ANN401
    ours, theirs = ([tensor.cpu() for tensor in tensors_of(batch)] for batch in (one, other))
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def check_trainer(trainer: Any, *, losses_in_float64: bool = False) -> CheckReport:  # noqa: ANN401
    """Return the report on a transformers trainer; `losses_in_float64`: `Tensor.float()` returns float64 meanwhile."""
    if not any(kind.__module__ == "transformers.trainer" for kind in type(trainer).__mro__):
        message = f"give ab.check a model, a loss and a batch, or a transformers Trainer, not {type(trainer).__name__}."
        raise UserError(message, code="unsupported_trainer")
    if trainer.args.world_size > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        message = "ab.check(trainer) runs in one process, without DeepSpeed and FSDP: do not start it by torchrun."
        raise UserError(message, code="several_ranks")
    devices, reason = [trainer.args.device] if trainer.args.device.type == "cuda" else [], ""
    with preserved_random_state(), torch.random.fork_rng(devices=devices), contextlib.redirect_stdout(io.StringIO()):
        for context in (_float_is_double, contextlib.nullcontext)[not losses_in_float64 :]:
            try:
                with context():
                    return _check(trainer, torch.float64)
            except (RuntimeError, TypeError, NotImplementedError) as error:
                reason = str(error).splitlines()[0][:100]
        report = _check(trainer, None)
        return replace(report, precision=f"{report.precision}, because in float64: {reason}")


@contextlib.contextmanager
def _float_is_double() -> Iterator[None]:
    as_float, Tensor.float = Tensor.float, Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.float = as_float  # type: ignore[method-assign]


def _check(trainer: Any, dtype: torch.dtype | None) -> CheckReport:  # noqa: ANN401
    report = _report(_Twin(trainer, dtype))
    try:
        twin = _Twin(trainer, dtype)
        exact(twin.trainer)
        return replace(report, exact=_report(twin))
    except UserError as error:
        refusal = CheckFinding(code="refused", observation=f"{error}", change="")
        return report if error.code == "already_exact" else replace(report, findings=(*report.findings, refusal))


def _report(twin: _Twin) -> CheckReport:
    """Let a copied trainer make its steps, with the same dropout in every split, and compare their gradients."""
    splits, findings, tolerance = [], dict[str, CheckFinding](), 0.0
    with FixedDraws(constant=True), warnings.catch_warnings(action="ignore", category=AnyBatchWarning):
        twin.trainer.train()
        for number, step in enumerate(twin.steps, 1):
            unsplit, sizes = twin.unsplit_gradient(step), tuple(map(len, step.samples))
            error, errors = relative_error(step.gradient, unsplit), errors_by_parameter(step.gradient, unsplit)
            tolerance = max(TOLERANCES.get(dtype, 0.1) for dtype in (twin.dtype, twin.loss_dtype))
            verdict = verdict_of(error, tolerance)
            splits.append(SplitResult(sizes=sizes, error=error, errors=errors, verdict=verdict))
            if verdict == "not equal":
                finding = _find_cause(twin, step, unsplit, f"step {number}")
                findings.setdefault(finding.code, finding)
    own, of_loss = (str(dtype).removeprefix("torch.") for dtype in (twin.dtype, twin.loss_dtype))
    return CheckReport(
        num_samples=sum(sum(split.sizes) for split in splits),
        precision=own if own == of_loss else f"{own}, but the model computes its loss in {of_loss}",
        tolerance=tolerance,
        splits=tuple(splits),
        findings=tuple(findings.values()),
    )


def _find_cause(twin: _Twin, step: _Step, unsplit: Gradients, where: str) -> CheckFinding:
    """Return the reason why a step's gradient differs, from the weights of its micro-batches."""
    found, expected = twin.weights(step, step.gradient, unsplit)
    if found is None or expected is None:
        has_norm = any(isinstance(module, BatchNormBase) and module.training for module in twin.model.modules())
        code = "unexplained" if expected is not None else "batch_norm" if has_norm else "couples_samples"
        what = f"no weights of micro-batches give the {'found' if found is None else 'exact'} gradient of {where}."
        return CheckFinding(code=code, observation=f"{what} {ADVICE[code][0]}", change=ADVICE[code][1])
    count, times = len(found), float(found @ expected / (expected @ expected))
    is_multiple = _near(found, times * expected)
    own, exact_ones = ("/".join(f"{weight:.3g}" for weight in given.tolist()) for given in (found, expected))
    what = f"the micro-batches of {where} have the weights {own} in its gradient instead of {exact_ones}."
    if count > 1 and _near(found, torch.ones(count)) and _near(expected.sum(), torch.ones(())):
        code, owner = "not_divided", "compute_loss_func" if twin.trainer.compute_loss_func else "the model"
        what = (
            f"the gradient of {where} is {'' if is_multiple else 'about '}{count} times too large: {owner} ignores "
            f"num_items_in_batch, so the mean losses of {count} micro-batches are added."
        )
    elif is_multiple:
        code, what = "wrong_total", f"the gradient of {where} is {times:.4g} times as large as it should be"
        items = float(step.num_items or 0)
        what += f": num_items_in_batch is {items:g}, but the loss has {items * times:g} items." if items else "."
    else:
        code = "mean_of_means" if _near(found, found.mean().expand(count)) else "uneven_weights"
    return CheckFinding(code=code, observation=what, change="trainer = ab.exact(trainer), before trainer.train().")


def _near(weights: Tensor, others: Tensor) -> bool:
    return bool((weights - others).norm() <= WEIGHT_TOLERANCE * others.norm())


def _copied(trainer: Any) -> Any:  # noqa: ANN401
    """Return a deep copy of a trainer, which shares the data and has few samples, no callbacks and no optimizer."""
    twin, args, handler = map(copy.copy, (trainer, trainer.args, trainer.callback_handler))
    accelerator, data, others = copy.copy(trainer.accelerator), trainer.train_dataset, trainer.eval_dataset
    accelerator.native_amp, accelerator.scaler = False, None  # rounding of autocast would hide errors
    handler.callbacks = [callback for callback in handler.callbacks if type(callback).__name__ == "DefaultFlowCallback"]
    vars(args).update(NEVER | OFF | NO_WORKERS | LIMITS)
    size, num_samples = args.train_batch_size, trainer.get_total_train_batch_size(args)
    num_samples += (size if num_samples > size else 0) + math.ceil(size / 2)  # a second step: shorter, and uneven
    memo: dict[int, Any] = {id(trainer): twin, id(trainer.args): args, id(trainer.callback_handler): handler}
    memo |= {id(trainer.accelerator): accelerator, id(data): data, id(others): others}
    memo |= {id(trainer.optimizer): None, id(trainer.lr_scheduler): None}
    for name, value in vars(trainer).items():
        # Other objects that cannot be copied, such as locks, are shared.
        with contextlib.nullcontext() if isinstance(value, nn.Module) else contextlib.suppress(TypeError, RuntimeError):
            vars(twin)[name] = copy.deepcopy(value, memo)
    twin.model_init = twin.neftune_noise_alpha = None
    if hasattr(data, "select"):
        twin.train_dataset = data.select(range(min(num_samples, len(data))))
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping):
        twin.train_dataset = torch.utils.data.Subset(data, range(min(num_samples, len(data))))
    else:
        args.max_steps = 2
    return twin


def check_made_trainer(make: Callable[[], Any]) -> CheckReport:
    """Check the trainer that a function returns, or the first one that it trains; only for the process of a command."""
    trainer_class, started = import_module("transformers").Trainer, []
    train = trainer_class.train

    def stop(trainer: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
        started.append(trainer)
        raise LoopStopped

    trainer_class.train = stop
    try:
        with contextlib.suppress(LoopStopped):
            started.append(make())
    finally:
        trainer_class.train = train
    return check_trainer(started[0], losses_in_float64=True)
