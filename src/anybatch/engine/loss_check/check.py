"""The declaration of a loss is checked on the first step: which samples to look at, what ranks agree on, what is said.

How a loss is looked at is in `declaration.py`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from anybatch.core.dtypes import is_low_precision
from anybatch.core.loss import ONE_NUMBER, Loss, LossFunction, LossSum
from anybatch.core.tree import Batch, count_samples, map_tensors
from anybatch.engine.accumulation.accumulate import Machine
from anybatch.engine.accumulation.planned_batch import OpenBatch
from anybatch.engine.inputs import Model
from anybatch.engine.loss_check.additivity import findings, subject_of
from anybatch.engine.loss_check.messages import broken, explained
from anybatch.engine.loss_check.recorded_model import UndecidedError
from anybatch.engine.loss_check.sample_choice import joined
from anybatch.engine.side_effects import Draws, untouched
from anybatch.errors import LossError
from anybatch.parallel.world import World

_MOST_STEPS = 8
"""How many steps are looked at before it is left at "could not be told"."""
_TAKEN = "taken as a mean over samples, because the check of the first step has found that it is one"
_OTHERWISE = "If you know better, Engine(check_loss=False) leaves this check out."
_Told = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one rank found: "holds", "broken", "inconclusive", or "idle" without a sample to look at.

    Attributes:
        kind: which.
        words: what is wrong, a whole message; or why nothing can be said, a clause.
        is_scalar: whether the loss function returned one number.
    """

    kind: Literal["holds", "broken", "inconclusive", "idle"]
    words: str = ""
    is_scalar: bool = False


class BareLoss:
    """A loss function that was passed as it is: if it turns out to be a mean over samples, it says so from then on."""

    def __init__(self, function: LossFunction, *, is_mean: bool = False) -> None:
        self.function = function
        self.is_mean = is_mean

    def __call__(self, model: Any, batch: Batch) -> Any:  # noqa: ANN401 (the user's model, and what the loss returns)
        """Return what the function returns; one number, once it is known to be a mean, as a sum and a count."""
        value = self.function(model, batch)
        if self.is_mean and isinstance(value, torch.Tensor) and not value.dim():
            number = count_samples(batch)
            return LossSum(value * number, number)
        return value


class DeclarationCheck:
    """Checks the declaration of a loss on the first step, and on later ones while nothing can be said.

    Args:
        loss: as it was declared, or bare.
        model: what the loss function is called with.
        modules: everything that may change in a forward.
        world: the ranks.
        enabled: whether to check at all. A bare function that returns one number is refused then.
    """

    def __init__(self, loss: Loss, model: Model, modules: nn.Module, world: World, *, enabled: bool) -> None:
        self._declared = loss
        self._bare = BareLoss(loss.function) if loss.terms is None and enabled else None
        self.loss = loss if self._bare is None else dataclasses.replace(loss, function=self._bare)
        self._model = model
        self._modules = modules
        self._world = world
        self._num_tries = 0
        self.pending = enabled and loss.encode is None  # a joint loss is never cut

    def provisional(self, machine: Machine) -> Machine:
        """Return a machine to try sizes with, before the check: a bare function's number is taken as a mean."""
        if self._bare is None:
            return machine
        loss = dataclasses.replace(self._declared, function=BareLoss(self._declared.function, is_mean=True))
        return dataclasses.replace(machine, loss=loss)

    def take(self, decisions: Mapping[str, str]) -> None:
        """Take what was found before a resume: a function that was a mean over samples then is one now."""
        if self._bare is not None and decisions.get("loss") == _TAKEN:
            self._bare.is_mean = True
            self.pending = False

    def look(self, opened: OpenBatch, machine: Machine, decisions: MutableMapping[str, str], tell: _Told) -> OpenBatch:
        """Look at the loss on some samples of this rank's first micro-batches; return the batch, nothing used up.

        Raises:
            LossError: on every rank: the loss is not what was declared, or is one number and not declared at all.
            RankFailedError: another rank could not load its samples.
        """
        num_needed = 1 if not opened.units or opened.units[0].num_samples > 1 else 3
        loaded: list[Batch] = []

        def verdict() -> Verdict:
            loaded.extend(itertools.islice(opened.micro_batches, num_needed))
            return self._verdict(loaded, machine)

        verdicts: list[Verdict] = self._world.together(verdict)
        self._agree(verdicts, decisions, tell)
        return dataclasses.replace(opened, micro_batches=itertools.chain(loaded, opened.micro_batches))

    def _agree(self, verdicts: Sequence[Verdict], decisions: MutableMapping[str, str], tell: _Told) -> None:
        """Come to one verdict from those of all ranks, the same on each."""
        bare = self._bare is not None and any(one.is_scalar for one in verdicts)
        broken = next((one.words for one in verdicts if one.kind == "broken"), None)
        if broken is not None:
            raise LossError(f"{ONE_NUMBER} Checked on the first step: {broken}" if bare else broken)
        if any(one.kind == "holds" for one in verdicts):
            self.pending = False
            decisions["loss"] = _TAKEN if bare else "as declared: the check of the first step has found that it holds"
            if bare and self._bare is not None:
                self._bare.is_mean = True
                tell("loss_taken_as_mean_over_samples", f"the loss is {_TAKEN}.")
            return
        reason = next((one.words for one in verdicts if one.kind == "inconclusive"), "no rank has a sample to look at")
        if bare:
            message = f"{ONE_NUMBER} (The check of the first step cannot tell: {reason}.)"
            raise LossError(message)
        self._num_tries += 1
        self.pending = self._num_tries < _MOST_STEPS
        decisions["loss"] = f"as declared, unchecked: {reason}"
        if self._num_tries == 1:
            tell(
                "loss_not_checked",
                f"the check of the loss's declaration cannot tell from this batch: {reason}. The loss is taken as "
                f"declared; the check is tried again on the next {_MOST_STEPS - 1} batches.",
            )

    def _verdict(self, loaded: Sequence[Batch], machine: Machine) -> Verdict:
        """Judge from this rank's samples."""
        if not loaded:
            return Verdict("idle")
        try:
            whole = _to_look_at(loaded, machine)
            with untouched(self._modules, self._world.device) as draws:
                self._keep_to_oneself()
                return self._judged(whole, machine, draws)
        except UndecidedError as error:
            return Verdict("inconclusive", str(error))
        except torch.OutOfMemoryError:
            pass
        except Exception as error:  # noqa: BLE001 (what is wrong with the batch is told when it is run in earnest)
            return Verdict("inconclusive", f"it cannot be looked at ({type(error).__name__})")
        if self._world.device.type == "cuda":  # outside of the handler: the failed frames hold no memory any more
            torch.cuda.empty_cache()
        return Verdict("inconclusive", "it ran out of memory")

    def _keep_to_oneself(self) -> None:
        """Let no module wait for other ranks: they may not look at as many samples, or at none. Undone afterwards."""
        for module in self._modules.modules():
            if isinstance(module, nn.SyncBatchNorm):
                module.training = False

    def _judged(self, whole: Batch, machine: Machine, draws: Draws) -> Verdict:
        with machine.autocast():
            is_low = torch.is_autocast_enabled(self._world.device.type)
        subject, doubtful = subject_of(
            self._declared,
            self._model,
            map_tensors(whole, lambda tensor: tensor.to(self._world.device)),
            autocast=machine.autocast,
            is_low=is_low or any(map(is_low_precision, self._modules.parameters())),
            draws=draws,
        )
        found = findings(subject)
        is_scalar = any(one.is_scalar for one in found.values())
        for name, one in found.items():
            if one.explanation:
                loss = self._declared
                words = f"{broken(loss, name, one)} {explained(name, one, named=loss.named)} {_OTHERWISE}"
                return Verdict("broken", words, is_scalar=is_scalar)
        for name, one in found.items():
            if doubtful[name] and not one.adds_up:
                return Verdict("inconclusive", doubtful[name], is_scalar=is_scalar)
        return Verdict("holds", is_scalar=is_scalar)


def _to_look_at(loaded: Sequence[Batch], machine: Machine) -> Batch:
    """Return a micro-batch of at least two samples.

    Raises:
        UndecidedError: there is none, or no rank may run the model by itself.
    """
    if machine.strategy.capabilities.lockstep:
        message = "the strategy keeps ranks in lockstep, so none may run the model by itself"
        raise UndecidedError(message)
    whole = loaded[0] if len(loaded) == 1 else joined(loaded)
    if whole is None or count_samples(whole) < 2:  # noqa: PLR2004 (one sample cannot be cut)
        message = "a micro-batch has one sample only"
        raise UndecidedError(message)
    return whole
