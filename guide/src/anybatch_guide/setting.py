"""`PlaygroundSetting`: the complete, validated setting of a playground run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from anybatch.errors import UserError
from anybatch_guide.tasks.task import Norm, TaskName

OptimizerName = Literal["sgd", "adamw"]
Precision = Literal["fp32", "bf16"]
MistakeName = Literal["", "no_division", "zero_each", "clip_each", "schedule_each", "drop_tail", "mean_of_means"]
NormPolicy = Literal["keep", "exact", "ghost", "freeze", "sync"]
GHOST_SAMPLES = 4
"""Samples that share statistics under the BatchNorm policy "ghost"."""
LIMITS: Mapping[str, tuple[float, float]] = {
    "micro_batch_size": (1, 256),
    "accumulation_steps": (1, 64),
    "learning_rate": (1e-6, 10.0),
    "steps": (1, 2_000),
    "seed": (0, 2**32 - 1),
    "ranks": (1, 2),
    "memory_limit_kib": (0, 2**20),
}
MAX_EFFECTIVE, MAX_SAMPLES, MAX_BYTES = 4_096, 5_000_000, 2**30
SAMPLE_BYTES: Mapping[TaskName, int] = {"digits": 60_000, "spirals": 1_000, "shapes": 100_000, "text": 600_000}
"""Approximate bytes per sample of the reference run (without accumulation); a test measures them."""
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "task": get_args(TaskName),
    "norm": get_args(Norm),
    "optimizer": get_args(OptimizerName),
    "precision": get_args(Precision),
    "mistake": get_args(MistakeName),
    "norm_policy": get_args(NormPolicy),
}


class SettingError(UserError):
    """A refused setting or experiment; `code` is the reason in a word or two."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaygroundSetting:
    """The settings of one run of the playground."""

    task: TaskName = "digits"  # name of the data and network
    norm: Norm = "none"  # normalization layers of the `shapes` network; "none" for other tasks
    micro_batch_size: int = 16  # samples of one forward and backward
    accumulation_steps: int = 4  # micro-batches of one optimizer step on each rank
    # "sgd" without momentum, or "adamw", whose update does not depend on a constant factor of the gradient
    optimizer: OptimizerName = "sgd"
    learning_rate: float = 0.1  # learning rate of the first step; it decays linearly to a tenth
    steps: int = 40  # optimizer steps
    seed: int = 0  # seed of the initial parameters and the order of samples
    precision: Precision = "fp32"  # number format of forward and backward
    mistake: MistakeName = ""  # the wrong loop to run instead of the engine; empty for the engine
    ranks: int = 1  # processes that share each effective batch, connected by gloo
    norm_policy: NormPolicy = "keep"  # the engine's BatchNorm policy; "keep" without BatchNorm
    memory_limit_kib: int = 0  # memory limit for the tensors of a rank, in KiB; 0: no limit

    def __post_init__(self) -> None:
        """Check every value, then their combination."""
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        for name, limits in LIMITS.items():
            _check_number(name, getattr(self, name), limits)
        self._check_together()

    @property
    def effective_batch_size(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.micro_batch_size * self.accumulation_steps * self.ranks

    @property
    def cut(self) -> str:
        """The split of the effective batch, such as `16 x 4`, or `16 x 4 x 2` on two ranks."""
        numbers = (self.micro_batch_size, self.accumulation_steps, *([self.ranks] if self.ranks > 1 else []))
        return " x ".join(map(str, numbers))

    def _check_together(self) -> None:
        size = self.effective_batch_size
        if self.norm != "none" and self.task != "shapes":
            message = f"norm={self.norm!r} is for the task 'shapes'; {self.task!r} has no choice of norms."
            raise SettingError(message, code="norm_of_task")
        if self.mistake and self.precision != "fp32":
            message = f"precision={self.precision!r} is for the engine; the loop {self.mistake!r} runs in fp32."
            raise SettingError(message, code="precision_of_mistake")
        self._check_engine_only()
        if size > MAX_EFFECTIVE:
            message = f"{self.cut} = {size} samples per step; the maximum is {MAX_EFFECTIVE:,}."
            raise SettingError(message, code="batch_too_large")
        if size * self.steps > MAX_SAMPLES:
            message = f"{size} samples x {self.steps} steps = {size * self.steps:,}; the maximum is {MAX_SAMPLES:,}."
            raise SettingError(message, code="too_much_work")
        needed = size * SAMPLE_BYTES[self.task]
        if needed > MAX_BYTES:
            message = (
                f"the unsplit batch of {size} samples of {self.task!r} needs about {needed // 2**20:,} MiB; the "
                f"maximum is {MAX_BYTES // 2**20:,}."
            )
            raise SettingError(message, code="too_much_memory")

    def _check_engine_only(self) -> None:
        """Refuse engine features for plain loops, and policies without BatchNorm."""
        if self.mistake and (self.ranks > 1 or self.memory_limit_kib):
            what = f"ranks={self.ranks}" if self.ranks > 1 else f"memory_limit_kib={self.memory_limit_kib}"
            message = f"{what} is for the engine; the loop {self.mistake!r} runs on one rank without a limit."
            raise SettingError(message, code="engine_only")
        if self.norm_policy != "keep" and (self.norm != "batch" or self.mistake):
            message = f"norm_policy={self.norm_policy!r} is for the engine on a network with norm='batch'."
            raise SettingError(message, code="policy_of_norm")
        if self.norm_policy == "ghost" and self.micro_batch_size < GHOST_SAMPLES:
            message = f"norm_policy='ghost' needs at least {GHOST_SAMPLES} samples per micro-batch (one group)."
            raise SettingError(message, code="policy_of_norm")


def parse_setting(value: object) -> PlaygroundSetting:
    """Return the setting for a JSON object, which must have exactly the fields of a setting."""
    if not isinstance(value, dict):
        message = f"a setting must be a JSON object, not {type(value).__name__}."
        raise SettingError(message, code="not_an_object")
    known = {field.name for field in fields(PlaygroundSetting)}
    if value.keys() != known:
        missing, unknown = sorted(known - value.keys()), sorted(map(str, value.keys() - known))
        message = f"a setting has exactly the keys {', '.join(sorted(known))}; {missing=}, {unknown=}."
        raise SettingError(message, code="keys")
    given: Mapping[str, Any] = value
    # JSON may write 1.0 as 1. Larger integers stay integers, so the check of numbers refuses them.
    rate = given["learning_rate"]
    return PlaygroundSetting(
        **{**given, "learning_rate": float(rate) if type(rate) is int and abs(rate) < MAX_BYTES else rate}
    )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if type(value) is not str or value not in choices:
        message = f"{name}={_short_repr(value)} must be one of {', '.join(map(repr, choices))}."
        raise SettingError(message, code=name)


def _check_number(name: str, value: object, limits: tuple[float, float]) -> None:
    """Refuse a number with the wrong type (a bool is an int in Python), or out of range."""
    lowest, highest = limits
    expected_type = float if name == "learning_rate" else int
    if type(value) is not expected_type:
        message = f"{name}={_short_repr(value)} must be {'a number' if expected_type is float else 'a whole number'}."
        raise SettingError(message, code=name)
    if not math.isfinite(value) or not lowest <= value <= highest:
        message = f"{name}={_short_repr(value)} must be from {lowest:,} to {highest:,}."
        raise SettingError(message, code=name)


def _short_repr(value: object) -> str:
    """Return the repr of a value, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."  # noqa: PLR2004 (what fits into a line)
