"""A copy of what the user trains, on which gradients can be taken again and again without a trace."""

import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import nn

from anybatch.core.batch import picked
from anybatch.core.comparison import Gradients, relative_error
from anybatch.core.loss import Loss, factors_of, returned_count, scaled, unit_counts
from anybatch.core.loss_kinds import AcrossSamples, LossFunction
from anybatch.core.tree import Batch, copied, count_samples, map_tensors, read_samples
from anybatch.diagnostics.coupling import ForwardTraits, find_traits
from anybatch.engine.engine import Engine
from anybatch.engine.inputs import Model, collect_modules
from anybatch.engine.loss_check.comparison import Verdict, judge
from anybatch.engine.loss_check.diagnosis import Diagnosis, diagnose
from anybatch.engine.loss_check.held import HeldDraws
from anybatch.engine.loss_check.runs import LossParts, LossRuns
from anybatch.engine.loss_check.sample_choice import SampleSource
from anybatch.engine.side_effects import SeededGenerators, without_side_effects
from anybatch.norms import Policy, PolicyName
from anybatch.parallel.strategy import trainable
from anybatch.parallel.world import World

_PARTS = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has."""


@dataclass(slots=True)
class GradientRuns:
    """A model, a loss and a batch of one number type, on the CPU.

    Attributes:
        model: what the loss function is called with; a copy of the user's.
        loss: the declared loss.
        batch: the whole batch.
        seed: of whatever is drawn.
        norms: the policy about BatchNorm, as the engine takes it.
        in_evaluation: modules that run in evaluation mode for now, because their behaviour in training was set aside.
        draws: torch's random numbers are those meanwhile, the same for every sample; None: as they come.
    """

    model: Model
    loss: Loss
    batch: Batch
    seed: int = 0
    norms: Policy | PolicyName | None = None
    in_evaluation: set[nn.Module] = field(default_factory=set)
    draws: HeldDraws | None = None

    @property
    def modules(self) -> nn.Module:
        """All that trains, as one module."""
        return collect_modules(self.model, self.loss)

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the parameters."""
        return next(iter(trainable(self.modules).values())).dtype

    @property
    def num_samples(self) -> int:
        """Samples in the batch."""
        return count_samples(self.batch)

    def whole(self, *, seed: int | None = None) -> Gradients:
        """Return the gradient of the un-split batch: one forward, one backward, no engine.

        A policy about BatchNorm makes another function of the model, which only the engine can run un-split.
        """
        if self.norms not in (None, "keep"):
            return self.split(self.num_samples, seed=seed)
        with self._untouched(self.seed if seed is None else seed), self._held():
            return self._backward(self._value(self.loss, copied(self.batch)))

    def split(self, micro_batch_size: int, *, seed: int | None = None) -> Gradients:
        """Return the gradient that the engine adds up over micro-batches."""
        with self._untouched(self.seed), self._held():
            engine = Engine(
                self.model,
                # `gradients` makes no update; an optimizer without state keeps the copies as they are.
                lambda named: torch.optim.SGD(named, lr=0.0),
                self.loss if self.draws is None else self._with_draws(self.draws),
                micro_batch_size=micro_batch_size,
                norms=self.norms or "keep",
                check_loss=False,
                seed=self.seed if seed is None else seed,
                world=World(),
            )
            try:
                return engine.gradients(copied(self.batch))
            finally:
                engine.close()

    def _held(self) -> AbstractContextManager[object]:
        if self.draws is None:
            return nullcontext()
        self.draws.restart()
        return self.draws

    def _with_draws(self, draws: HeldDraws) -> Loss:
        """Return the loss of which every call draws the same numbers."""

        def repeated(function: LossFunction) -> LossFunction:
            if isinstance(function, nn.Module):  # its parameters train, so it stays a module; it is a copy
                function.register_forward_pre_hook(lambda *_: draws.restart())
                return function

            def call(model: Any, batch: Batch) -> Any:  # noqa: ANN401 (as the user's)
                draws.restart()
                return function(model, batch)

            return call

        loss = dataclasses.replace(self.loss, function=repeated(self.loss.function))
        if not isinstance(loss.kind, AcrossSamples):
            return loss
        return dataclasses.replace(loss, kind=dataclasses.replace(loss.kind, encode=repeated(loss.kind.encode)))

    def diagnosis(self) -> tuple[Verdict, Diagnosis] | None:
        """Check the declaration of the loss on a few samples, as the engine's first step does; None if it is right.

        BatchNorm is left out, as there.
        """
        own = trainable(self.modules)
        parts = LossParts(
            loss=self.loss,
            model=self.model,
            modules=self.modules,
            device=torch.device("cpu"),
            autocast=nullcontext,
            call=lambda function, batch: function(self.model, batch),
            leaves=lambda: own,
        )
        batch, number = read_samples(self.batch)
        source = SampleSource(range(number), functools.partial(picked, batch), number)
        with self._untouched(self.seed) as generators:
            runs = LossRuns(parts, generators)
            verdict = judge(runs, source)
            return (verdict, diagnose(runs, verdict)) if verdict.kind == "broken" else None

    def forward_traits(self) -> ForwardTraits:
        """Observe every module in one forward of the whole batch."""
        with self._untouched(self.seed):
            return find_traits(self.modules, lambda: self._output(copied(self.batch)), self.num_samples)

    def returns_a_number(self) -> bool:
        """Whether the loss function returns one number, and neither a sum with its count nor one loss per item."""
        with self._untouched(self.seed):  # with gradients, which a loss may take by itself
            output = self._output(copied(self.batch))
        return isinstance(output, torch.Tensor) and not output.dim()

    def changed_by_forward(self, tolerance: float) -> list[str] | None:
        """Return what a forward changes that the next one computes with, buffers and attributes of modules.

        None where the gradient of a second forward is that of the first; an empty list where it is not, and what keeps
        the state is no module.
        """
        with self._untouched(self.seed) as draws:
            # All three forwards draw the same numbers, so that only what is kept can make a difference.
            first = self._backward(self._value(self.loss, copied(self.batch)))
            before = dict(_kept_by_modules(self.modules))
            draws.seed(self.seed)
            self._value(self.loss, copied(self.batch))
            draws.seed(self.seed)
            again = self._backward(self._value(self.loss, copied(self.batch)))
            # Counters change with every forward and matter to no gradient.
            if relative_error(again, first) <= tolerance:
                return None
            return [name for name, value in _kept_by_modules(self.modules) if _differs(value, before.get(name))]

    def differentiates_parameters(self) -> bool:
        """Whether the loss function takes gradients with respect to parameters, which are sums over its samples."""
        fired: list[None] = []
        with self._untouched(self.seed):
            own = trainable(self.modules).values()
            # A gradient that is returned goes through the hook, and so does one that is added to a parameter.
            hooks = [one.register_hook(lambda _: fired.append(None)) for one in own]
            try:
                self._output(copied(self.batch))
            finally:
                for hook in hooks:
                    hook.remove()
        return bool(fired)

    @contextmanager
    def evaluating(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Put these modules, not their children, into evaluation mode meanwhile."""
        before = set(self.in_evaluation)
        self.in_evaluation |= set(modules)
        try:
            yield
        finally:
            self.in_evaluation = before

    @contextmanager
    def _untouched(self, seed: int) -> Iterator[SeededGenerators]:
        """Seed, set modules to evaluation mode, and put buffers, modes and random numbers back."""
        functions = self.loss.functions.values()
        owners = [*self.modules.modules(), *(one for one in functions if not isinstance(one, FunctionType))]
        # The modules and callable objects are copies, so that no other thread changes their attributes.
        kept = [(vars(one), set(vars(one)), _attributes(one)) for one in owners if hasattr(one, "__dict__")]
        with without_side_effects(self.modules, torch.device("cpu"), functions=functions) as draws:
            draws.seed(seed)
            for module in self.in_evaluation:
                # The attribute, since `eval()` would reach the children too.
                module.training = False
            try:
                yield draws
            finally:
                for attributes, names, values in kept:
                    for name in attributes.keys() - names:
                        del attributes[name]
                    attributes.update(values)

    def _output(self, batch: Batch) -> Any:  # noqa: ANN401 (whatever the user's loss function returns)
        """Return the loss function's output for a batch as a whole."""
        encode = self.loss.kind.encode
        given = batch if encode is None else encode(self.model, batch)
        if self.draws is not None:  # each call of the two draws the same numbers, as in micro-batches
            self.draws.restart()
        return self.loss.function(self.model, given)

    def _value(self, loss: Loss, batch: Batch) -> torch.Tensor:
        """Return the loss of the whole batch, as declared."""
        counts = unit_counts(loss, batch, self.num_samples)
        output = self._output(batch)
        terms = scaled(loss, output, factors_of(loss, counts, counts, 1.0))
        value = torch.stack(terms).sum()
        if not loss.kind.brings_count:
            return value
        # An integer tensor divides in float32, whatever the type of the loss.
        return value * (self.num_samples / torch.as_tensor(returned_count(output)).to(torch.float64)).to(value.dtype)

    def _backward(self, value: torch.Tensor) -> Gradients:
        own = trainable(self.modules)
        # A parameter that no forward reaches has the gradient None, as after `backward()`.
        found = torch.autograd.grad(value, list(own.values()), allow_unused=True)
        return dict(zip(own, found, strict=True))


def copied_runs(
    model: Model, loss: Loss, batch: Batch, dtype: torch.dtype | None, *, seed: int, norms: Policy | PolicyName | None
) -> GradientRuns:
    """Return gradient runs on CPU copies of everything, floating-point numbers as `dtype`; None leaves their type."""
    # In one call, because a loss may share modules with the model.
    model, loss = copy.deepcopy((model, loss), _computed_attributes(collect_modules(model, loss)))

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None)

    for module in [model] if isinstance(model, nn.Module) else model.values():
        module.to("cpu", dtype)
        if not module.training:  # parts of a model that trains may be frozen in evaluation mode, and stay so
            module.train()
    if isinstance(loss.function, nn.Module):
        loss.function.to("cpu", dtype)
    return GradientRuns(model, loss, map_tensors(batch, convert), seed, norms)


def _kept_by_modules(modules: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the buffers of modules, and what they keep in attributes, by name and as they are now."""
    yield from ((name, buffer.clone()) for name, buffer in modules.named_buffers())
    for place, module in modules.named_modules():
        for name, value in _attributes(module).items():
            if not name.startswith("_") and name != "training":
                yield (f"{place}.{name}" if place else name), value


def _attributes(owner: object) -> dict[str, Any]:
    """Return the attributes of an object; tensors and containers are copied."""
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
        for name, value in vars(owner).items()
        if name not in _PARTS and isinstance(value, torch.Tensor | int | float | str | list | dict | set | deque | None)
    }


def _differs(one: Any, other: Any) -> bool:  # noqa: ANN401 (whatever modules keep)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return not torch.equal(one, other)
    if isinstance(one, list | tuple | deque) and isinstance(other, list | tuple | deque):
        return len(one) != len(other) or any(map(_differs, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() != other.keys() or any(_differs(one[key], other[key]) for key in one)
    # Objects of other kinds are their own: copies of them are others in any case.
    return isinstance(one, int | float | str | None) and one != other


def _computed_attributes(modules: nn.Module) -> dict[int, torch.Tensor]:
    """Return copies of tensors that modules have computed and kept, by id, for `deepcopy`, which refuses them.

    The old `torch.nn.utils.spectral_norm` and `weight_norm` keep the weight of their last forward.
    """
    found = (value for module in modules.modules() for value in vars(module).values())
    return {id(one): one.detach().clone() for one in found if isinstance(one, torch.Tensor) and not one.is_leaf}
