"""Refuses arguments of a wrong type before anything else reads them: every argument of an engine is in one table."""

from collections.abc import Mapping

from torch.optim import Optimizer

from anybatch.core.records import Observer
from anybatch.core.whole_numbers import checked_int, is_number, refuse_unless
from anybatch.engine.gradient_noise import GradientNoise
from anybatch.engine.spec import Hardware, TrainSpec
from anybatch.parallel.world import World

_OPTIMIZER = "a torch optimizer, or a function such as lambda named_parameters: torch.optim.AdamW(named_parameters)"
_CLIP = "the largest gradient norm as a number, ClipByNorm, ClipByValue, a list of these for each group, or None"
_OBSERVER = "an object with a method observe(record), such as ab.JsonlLog(path); for several: Observers(first, second)"


def refuse_wrong_types(spec: TrainSpec, hardware: Hardware, observer: Observer | None) -> None:
    """Refuse arguments of a wrong type; what a value of the right type means is checked where it is used.

    Raises:
        UserError: with the argument, its value, and what it must be.
    """
    if spec.seed is not None:
        checked_int("seed", spec.seed, least=None)
    world, strategy = hardware.world, hardware.strategy
    observes = callable(getattr(observer, "observe", None)) and not isinstance(observer, type)
    for is_valid, name, value, expected in (
        (isinstance(spec.optimizer, Optimizer) or callable(spec.optimizer), "optimizer", spec.optimizer, _OPTIMIZER),
        (not isinstance(spec.clip, (str, bytes, bool, Mapping)), "clip", spec.clip, _CLIP),
        (_is_flag(spec.measure_gradient_norm), "measure_gradient_norm", spec.measure_gradient_norm, "True or False"),
        (_is_flag(spec.check_loss), "check_loss", spec.check_loss, "True or False"),
        (spec.noise is None or isinstance(spec.noise, GradientNoise), "noise", spec.noise, "a GradientNoise, or None"),
        (
            spec.average_decay is None or is_number(spec.average_decay),
            "average_decay",
            spec.average_decay,
            "a number between 0 and 1, or None",
        ),
        (spec.buffers is None or isinstance(spec.buffers, Mapping), "buffers", spec.buffers, "a dict, or None"),
        (_is_word(spec.precision), "precision", spec.precision, "one of 'fp32', 'bf16' and 'fp16'"),
        (_is_word(spec.bf16_weights), "bf16_weights", spec.bf16_weights, "'copied', 'split' or 'stochastic'"),
        (_is_word(hardware.deal), "deal", hardware.deal, "'balanced' or 'fixed'"),
        (
            isinstance(strategy, str) or (hasattr(strategy, "capabilities") and not isinstance(strategy, type)),
            "strategy",
            strategy,
            "a name such as 'ddp', 'auto', or a strategy object",
        ),
        (world is None or isinstance(world, World), "world", world, "an ab.World, or None"),
        (observer is None or observes, "observer", observer, _OBSERVER),
    ):
        refuse_unless(is_valid, name, value, expected)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_word(value: object) -> bool:
    return isinstance(value, str)
