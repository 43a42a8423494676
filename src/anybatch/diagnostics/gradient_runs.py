"""A copy of the user's model that computes gradients repeatedly, with the same random numbers and no side effects."""

import contextlib
import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import nn

from anybatch.core.batch import select_each
from anybatch.core.loss import Loss, factors_of, returned_count, scaled, unit_counts
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.tensors import Gradients, relative_error
from anybatch.core.torch_internals import refused_in_backward
from anybatch.core.tree import Batch, copied, count_samples, map_tensors, mark_and_count, tensors_of
from anybatch.data.random_state import host_random_digest, seed_generators
from anybatch.engine.engine import Engine
from anybatch.engine.loss_check.comparison import SampleSource, Verdict, judge
from anybatch.engine.loss_check.diagnosis import Diagnosis, diagnose
from anybatch.engine.loss_check.fixed_draws import FixedDraws
from anybatch.engine.loss_check.runs import LossParts, LossRuns
from anybatch.engine.user_code import Model, SeededGenerators, collect_modules, without_side_effects
from anybatch.norms import Policy, PolicyName
from anybatch.norms.layers import find_coupling_modules
from anybatch.parallel.strategy import trainable
from anybatch.parallel.world import World


@dataclass(frozen=True, slots=True)
class ForwardTraits:
    """Properties of modules observed in one forward: names of modules, in the order in which they finished."""

    random_modules: tuple[str, ...]  # innermost modules that drew random numbers
    coupling_modules: tuple[str, ...]  # innermost modules whose output for a sample depends on other samples
    narrowest_dtype: torch.dtype | None  # of all outputs of modules; None without floating-point outputs


class RepeatedDraws:
    """Makes every forward repeat its random numbers: torch's for each sample, Python's and numpy's from one seed.

    If `constant`, every draw of torch returns the same number, see `FixedDraws`.
    """

    def __init__(self, *, constant: bool = False) -> None:
        self.seed = 0
        self.by_host = False  # whether a forward drew from Python's or numpy's generator
        self.torch = FixedDraws(constant=constant)  # its `unknown` are operations that cannot be repeated
        self._initial_state: tuple[int, ...] = ()

    def fixed(self, seed: int) -> AbstractContextManager[object]:
        """Return a context in which a sample gets the same numbers from torch in every forward."""
        self.seed = seed
        self.torch.restart()
        return self.torch

    def call(self, function: LossFunction, model: Any, batch: Batch) -> Any:  # noqa: ANN401 (as the user's)
        """Call the user's function, with all random numbers starting again from the first."""
        self._restart()
        output = function(model, batch)
        self._record()
        return output

    @contextmanager
    def applied_to(self, loss: Loss) -> Iterator[Loss]:
        """Yield a copy of the loss that draws the same numbers in each call."""
        handles: list[Any] = []

        def repeated(function: LossFunction) -> LossFunction:
            if isinstance(function, nn.Module):  # a copy; with hooks it stays a module with parameters
                handles.append(function.register_forward_pre_hook(lambda *_: self._restart()))
                handles.append(function.register_forward_hook(lambda *_: self._record()))
                return function
            return functools.partial(self.call, function)

        changed = dataclasses.replace(loss, function=repeated(loss.function))
        if loss.kind.encode is not None:
            kind = dataclasses.replace(loss.kind, encode=repeated(loss.kind.encode))
            changed = dataclasses.replace(changed, kind=kind)
        try:
            yield changed
        finally:
            for handle in handles:
                handle.remove()

    def _restart(self) -> None:
        self.torch.restart()
        seed_generators(self.seed)
        self._initial_state = host_random_digest()

    def _record(self) -> None:
        self.by_host = self.by_host or host_random_digest() != self._initial_state


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has."""


@dataclass(slots=True)
class GradientRuns:
    """Computes gradients of a model and a loss on one batch repeatedly, in one floating-point dtype, on the CPU."""

    model: Model  # a copy of the user's model
    loss: Loss
    batch: Batch
    seed: int = 0
    norms: Policy | PolicyName | None = None
    in_evaluation: set[nn.Module] = field(default_factory=set)  # modules that run in evaluation mode
    draws: RepeatedDraws | None = None  # None: random numbers come from seeded generators

    @property
    def modules(self) -> nn.Module:
        """The modules of the model and the loss, as one module."""
        return collect_modules(self.model, self.loss)

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the parameters."""
        return next(iter(trainable(self.modules).values())).dtype

    @property
    def num_samples(self) -> int:
        """Samples in the batch."""
        return count_samples(self.batch)

    def unsplit_gradient(self, *, seed: int | None = None) -> Gradients:
        """Return the gradient of the un-split batch: one forward, one backward, no engine.

        With a BatchNorm policy (`norms`), which changes the model, the engine runs the batch as one micro-batch.
        """
        if self.norms not in (None, "keep"):
            return self.split(self.num_samples, seed=seed)
        seed = self.seed if seed is None else seed
        with self._restored(seed), nullcontext() if self.draws is None else self.draws.fixed(seed):
            return self._backward(self._value(self.loss, copied(self.batch)))

    def split(self, micro_batch_size: int, *, seed: int | None = None) -> Gradients:
        """Return the gradient that the engine accumulates over micro-batches."""
        seed = self.seed if seed is None else seed
        with self._restored(seed):
            if self.draws is None:
                return self._accumulated(self.loss, micro_batch_size, seed)
            with self.draws.fixed(seed), self.draws.applied_to(self.loss) as loss:
                return self._accumulated(loss, micro_batch_size, seed)

    def _accumulated(self, loss: Loss, micro_batch_size: int, seed: int) -> Gradients:
        engine = Engine(
            self.model,
            # `gradients` makes no update, and SGD has no state to copy.
            lambda named: torch.optim.SGD(named, lr=0.0),
            loss,
            micro_batch_size=micro_batch_size,
            norms=self.norms or "keep",
            check_loss=False,
            seed=seed,
            world=World(),
        )
        try:
            return engine.gradients(copied(self.batch))
        finally:
            engine.close()

    def diagnosis(self) -> tuple[Verdict, Diagnosis] | None:
        """Check the declaration of the loss on a few samples, as the engine's first step does; return None if correct.

        BatchNorm is not examined.
        """
        parameters = trainable(self.modules)
        parts = LossParts(
            loss=self.loss,
            model=self.model,
            modules=self.modules,
            device=torch.device("cpu"),
            autocast=nullcontext,
            call=lambda function, batch: function(self.model, batch),
            leaves=lambda: parameters,
        )
        batch, number = mark_and_count(self.batch)
        source = SampleSource(range(number), functools.partial(select_each, batch), number)
        with self._restored(self.seed) as generators:
            runs = LossRuns(parts, generators)
            runs.has_aligned_draws = True  # otherwise `find_obstacle` has ended the check
            verdict = judge(runs, source)
            return (verdict, diagnose(runs, verdict)) if verdict.kind == "broken" else None

    def forward_traits(self) -> ForwardTraits:
        """Observe every module in one forward of the whole batch."""
        names = {module: name for name, module in self.modules.named_modules()}
        states: dict[nn.Module, list[int]] = {}
        drew: dict[nn.Module, None] = {}
        dtypes: list[torch.dtype] = []

        def before(module: nn.Module, _args: object) -> None:
            states[module] = torch.default_generator.get_state().tolist()

        def after(module: nn.Module, _args: object, output: object) -> None:
            # The generator's state changes with any draw; inside of `vmap`, only lists can be compared.
            if states[module] != torch.default_generator.get_state().tolist():
                drew[module] = None
            # A module may return something other than a batch.
            with contextlib.suppress(TypeError):
                dtypes.extend(t.dtype for t in tensors_of(output) if t.is_floating_point())

        hooks = [module.register_forward_pre_hook(before) for module in names]
        hooks += [module.register_forward_hook(after) for module in names]
        with self._restored(self.seed):
            try:
                self._output(copied(self.batch))
            finally:
                for hook in hooks:
                    hook.remove()
            coupling = find_coupling_modules(self.modules, lambda: self._output(copied(self.batch)), self.num_samples)
        return ForwardTraits(
            # Innermost ones: those that contain no other of these modules.
            random_modules=tuple(names[m] for m in drew if not {*m.modules()} & {*drew} - {m}),
            coupling_modules=tuple(coupling),
            narrowest_dtype=min(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=None),
        )

    def returns_a_number(self) -> bool:
        """Whether the loss function returns one number, and neither a sum with its count nor one loss per item."""
        with self._restored(self.seed):  # gradients stay enabled, since the loss may use autograd
            output = self._output(copied(self.batch))
        return isinstance(output, torch.Tensor) and not output.dim()

    def changed_by_forward(self, tolerance: float) -> list[str] | None:
        """Return all buffers and attributes of modules that a forward changes, if it changes the next gradient.

        None if a second forward gives the same gradient; empty if the gradient differs and no module has changed.
        """
        with self._restored(self.seed) as draws:
            # All three forwards draw the same numbers, so that only kept state can change the gradient.
            first = self._backward(self._value(self.loss, copied(self.batch)))
            before = dict(_kept_by_modules(self.modules))
            draws.seed(self.seed)
            self._value(self.loss, copied(self.batch))
            draws.seed(self.seed)
            again = self._backward(self._value(self.loss, copied(self.batch)))
            # Counters change in every forward, but do not affect gradients.
            if relative_error(again, first) <= tolerance:
                return None
            return [name for name, value in _kept_by_modules(self.modules) if _differs(value, before.get(name))]

    @contextmanager
    def _restored(self, seed: int) -> Iterator[SeededGenerators]:
        """Seed, set `in_evaluation`, and restore buffers, modes, attributes and random states at the end."""
        functions = self.loss.functions.values()
        owners = [*self.modules.modules(), *(call for call in functions if not isinstance(call, FunctionType))]
        # The modules and callable objects are copies, so that no other thread changes their attributes.
        kept = [(vars(owner), set(vars(owner)), _attributes(owner)) for owner in owners if hasattr(owner, "__dict__")]
        with without_side_effects(self.modules, torch.device("cpu"), functions=functions) as draws:
            draws.seed(seed)
            for module in self.in_evaluation:
                # Not by `eval()`, which would change submodules too.
                module.training = False
            try:
                yield draws
            finally:
                for attributes, names, values in kept:
                    for name in attributes.keys() - names:
                        del attributes[name]
                    attributes.update(values)

    def _output(self, batch: Batch) -> Any:  # noqa: ANN401 (the result of the user's loss function)
        """Return the loss function's output for the un-split batch."""
        encode = self.loss.kind.encode
        inputs = batch if encode is None else self._called(encode, batch)
        return self._called(self.loss.function, inputs)

    def _called(self, function: LossFunction, batch: Batch) -> Any:  # noqa: ANN401 (as the user's)
        return function(self.model, batch) if self.draws is None else self.draws.call(function, self.model, batch)

    def _value(self, loss: Loss, batch: Batch) -> torch.Tensor:
        """Return the loss of the un-split batch, as declared."""
        counts = unit_counts(loss, batch, self.num_samples)
        output = self._output(batch)
        terms = scaled(loss, output, factors_of(loss, counts, counts, 1.0))
        value = torch.stack(terms).sum()
        if not loss.kind.returns_count:
            return value
        # An integer tensor would divide in float32, regardless of the type of the loss.
        return value * (self.num_samples / torch.as_tensor(returned_count(output)).to(torch.float64)).to(value.dtype)

    def _backward(self, value: torch.Tensor) -> Gradients:
        """Return the gradients that a backward adds to parameters, including gradients added by layers directly."""
        parameters = trainable(self.modules)
        for parameter in parameters.values():
            parameter.grad = None
        if value.requires_grad:
            try:
                torch.autograd.backward(value, inputs=list(parameters.values()))
            except RuntimeError as error:
                if (refused := refused_in_backward(error)) is not None:
                    raise refused from error
                raise
        # A parameter that no forward reaches has the gradient None.
        found = {name: parameter.grad for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        return found


def copied_runs(
    model: Model, loss: Loss, batch: Batch, dtype: torch.dtype | None, *, seed: int, norms: Policy | PolicyName | None
) -> GradientRuns:
    """Return gradient runs on CPU copies, with floating-point tensors in `dtype` (None: their own dtype)."""
    # One call for both, because a loss may share modules with the model.
    model, loss = copy.deepcopy((model, loss), _computed_attributes(collect_modules(model, loss)))

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None)

    for module in [model] if isinstance(model, nn.Module) else model.values():
        module.to("cpu", dtype)
        if not module.training:  # if the model is in training mode, submodules may be in evaluation mode on purpose
            module.train()
    if isinstance(loss.function, nn.Module):
        loss.function.to("cpu", dtype)
    return GradientRuns(model, loss, map_tensors(batch, convert), seed, norms)


def _kept_by_modules(modules: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the current buffers and attributes of modules, by name."""
    yield from ((name, buffer.clone()) for name, buffer in modules.named_buffers())
    for path, module in modules.named_modules():
        for name, value in _attributes(module).items():
            if not name.startswith("_") and name != "training":
                yield (f"{path}.{name}" if path else name), value


def _attributes(owner: object) -> dict[str, Any]:
    """Return the attributes of an object; tensors and containers are copied."""
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
        for name, value in vars(owner).items()
        if name not in _MODULE_ATTRIBUTES
        and isinstance(value, torch.Tensor | int | float | str | list | dict | set | deque | None)
    }


def _differs(one: Any, other: Any) -> bool:  # noqa: ANN401 (any attribute of a module)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return not torch.equal(one, other)
    # Compare containers by element, because `repr` abbreviates large tensors.
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() != other.keys() or any(_differs(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque) and isinstance(other, list | tuple | deque):
        return len(one) != len(other) or any(map(_differs, one, other))
    return repr(one) != repr(other)  # `==` fails for objects that contain tensors


def _computed_attributes(modules: nn.Module) -> dict[int, torch.Tensor]:
    """Return id -> copy of computed tensors that modules keep, as a memo for `deepcopy`, which cannot copy them.

    The old `torch.nn.utils.spectral_norm` and `weight_norm` keep the weight of their last forward.
    """
    found = (value for module in modules.modules() for value in vars(module).values())
    return {id(kept): kept.detach().clone() for kept in found if isinstance(kept, torch.Tensor) and not kept.is_leaf}
