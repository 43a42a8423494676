"""The settings of a run: one class for the defaults of a recipe, the options of `train`, and the header of a run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args

from anybatch.core.compatibility import STRATEGY_NAMES, PrecisionName
from anybatch.core.geometry import checked_int, is_number
from anybatch.core.schedules import BatchRamp, sizes_of
from anybatch.errors import BatchSizeError, UserError

ScalingRule = Literal["linear", "sqrt", "none"]
MicroBatchSizeChoice = int | Literal["auto"]

_ALTERNATIVES: Final = (("epochs", "steps"), ("micro_batch_tokens", "micro_batch_size", "accumulation_steps"))
"""A given setting replaces all settings of its group in the recipe or in the resumed run."""
_INTEGERS: Final = frozenset((*_ALTERNATIVES[0], *_ALTERNATIVES[1], "effective_batch_size", "base_batch_size", "seed"))
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "learning_rate_rule": get_args(ScalingRule),
    "precision": get_args(PrecisionName),
    "strategy": ("auto", *STRATEGY_NAMES),
}
"""All values of some settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The settings of a run.

    A setting that is None is taken from the resumed run, then from the recipe's defaults, then from `STANDARD`. Every
    field is an option of `anybatch train`, with the text below as its help.

    Args:
        effective_batch_size: samples of one optimizer step, over all ranks; 32,128@20000 begins with 32 and changes to
            128 after 20,000 samples (in Python: a `BatchRamp`; commands other than train use its largest stage)
        micro_batch_size: maximum samples per forward and backward; auto tries a few sizes and takes the fastest
        accumulation_steps: micro-batches per rank and step, instead of a micro-batch size
        micro_batch_tokens: maximum tokens per forward and backward, including padding, instead of a number of samples;
            for recipes that give the length of each sample
        epochs: passes over the data, from the start of the run (default: the recipe's epochs or steps, else 1)
        steps: optimizer steps, counted from the start of the run, instead of epochs
        learning_rate: learning rate at the base batch size; the optimizer gets it scaled to the effective batch size
        base_batch_size: samples per step for which the learning rate was tuned (default: the recipe's effective batch
            size)
        learning_rate_rule: how to scale the learning rate with the effective batch size (default: depends on the
            optimizer)
        precision: number format of forward and backward
        strategy: how ranks sum gradients
        average_decay: evaluate with an exponential moving average of the weights, with this decay, such as 0.999
        seed: seed of initial weights, sample order, augmentation and dropout

    Raises:
        BatchSizeError: a batch size is not a whole number of at least 1.
        UserError: another value is invalid, or two settings contradict each other.
    """

    effective_batch_size: int | BatchRamp | None = None
    micro_batch_size: MicroBatchSizeChoice | None = None
    accumulation_steps: int | None = None
    micro_batch_tokens: int | None = None
    epochs: int | None = None
    steps: int | None = None
    learning_rate: float | None = None
    base_batch_size: int | None = None
    learning_rate_rule: ScalingRule | None = None
    precision: PrecisionName | None = None
    strategy: str | None = None
    average_decay: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check each value, and that no two values contradict each other."""
        for name, value in self.given.items():
            if value not in CHOICES.get(name, (value,)):
                message = f"{name}={value!r} must be one of {', '.join(map(repr, CHOICES[name]))}, or None."
                raise UserError(message)
            # A ramp has checked its own sizes.
            if name in _INTEGERS and not isinstance(value, BatchRamp) and (name, value) != ("micro_batch_size", "auto"):
                error = BatchSizeError if name.endswith("batch_size") else UserError
                checked_int(name, value, minimum=None if name == "seed" else 1, error=error)
        rate = self.learning_rate
        if rate is not None and not (is_number(rate) and rate > 0.0):
            message = f"learning_rate={rate!r} must be a finite number above 0."
            raise UserError(message)
        tokens = _ALTERNATIVES[1]
        for first, second in (_ALTERNATIVES[0], tokens[:2], (tokens[0], tokens[2])):
            values = getattr(self, first), getattr(self, second)
            if None not in values:
                message = f"{first}={values[0]} and {second}={values[1]} contradict each other. Pass one of them."
                raise UserError(message)

    def with_defaults(self, defaults: "RunConfig") -> "RunConfig":
        """Return these settings, with the settings of `defaults` in place of None.

        A setting also replaces its alternatives in `defaults`: `steps`, for example, replaces `epochs`.
        """
        given = self.given
        replaced = {name for group in _ALTERNATIVES if given.keys() & set(group) for name in group}
        kept = {name: value for name, value in defaults.given.items() if name not in replaced}
        return RunConfig(**kept | given)

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are not None, by name."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    @property
    def largest_batch_size(self) -> int:
        """Maximum samples of a step; with a ramp, the samples of a step in its largest stage."""
        assert self.effective_batch_size is not None
        return max(sizes_of(self.effective_batch_size))

    def as_json(self) -> dict[str, Any]:
        """Return the settings as a dict for JSON; a ramp in the notation of the command line."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        size = self.effective_batch_size
        return values | {"effective_batch_size": size.notation if isinstance(size, BatchRamp) else size}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Return the settings from a result of `as_json`."""
        size = values["effective_batch_size"]
        values = {**values, "effective_batch_size": BatchRamp.parse(size) if isinstance(size, str) else size}
        other = values.get("micro_batch_tokens") or values.get("accumulation_steps")
        if other and values.get("micro_batch_size") == "auto":
            del values["micro_batch_size"]  # earlier versions wrote it next to the setting that replaced it
        return cls(**values)

    def differences(self, other: "RunConfig", names: Iterable[str]) -> tuple[str, ...]:
        """Return "name before -> after" for each of the settings `names` that is different in `other`."""
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in names)
        return tuple(f"{name} {before} -> {after}" for name, before, after in pairs if before != after)


STANDARD: Final = RunConfig(micro_batch_size="auto", precision="fp32", strategy="auto", seed=0)
"""Settings that are used if neither the run nor its recipe sets them."""
