"""A copy of the user's model, for repeated gradients without side effects and with the same random numbers."""

import contextlib
import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from anybatch.core.batch import picked
from anybatch.core.loss import Loss, factors_of, returned_count, scaled, unit_counts
from anybatch.core.loss_kinds import AcrossSamples, LossFunction
from anybatch.core.tensors import Gradients, relative_error
from anybatch.core.tree import Batch, copied, count_samples, map_tensors, read_samples, tensors_of
from anybatch.data.random_state import host_random_digest, seed_generators
from anybatch.engine.engine import Engine
from anybatch.engine.loss_check.comparison import SampleSource, Verdict, judge
from anybatch.engine.loss_check.diagnosis import Diagnosis, diagnose
from anybatch.engine.loss_check.held import HeldDraws
from anybatch.engine.loss_check.runs import LossParts, LossRuns
from anybatch.engine.torch_internals import refused_in_backward
from anybatch.engine.user_code import Model, SeededGenerators, collect_modules, without_side_effects
from anybatch.norms import Policy, PolicyName
from anybatch.norms.layers import tried_couplings
from anybatch.parallel.strategy import trainable
from anybatch.parallel.world import World


@dataclass(frozen=True, slots=True)
class ForwardTraits:
    """Names of modules with properties observed in one forward, in the order in which the modules finished."""

    random_modules: tuple[str, ...]  # advanced torch's generator, without a child that did
    coupling_modules: tuple[str, ...]  # their output for a sample depends on others, without a child that does
    narrowest_dtype: torch.dtype | None  # returned by any module; None without floating-point outputs


def find_traits(modules: nn.Module, run: Callable[[], object], num_samples: int) -> ForwardTraits:
    """Run a forward and observe every module that it calls; the caller must restore buffers."""
    names = {module: name for name, module in modules.named_modules()}
    states: dict[nn.Module, bytes] = {}
    drew: list[nn.Module] = []
    dtypes: list[torch.dtype] = []

    def before(module: nn.Module, _args: object) -> None:
        states[module] = _state()

    def after(module: nn.Module, _args: object, output: object) -> None:
        # A generator that has moved is the only sign of a draw that works for every module.
        if states[module] != _state():
            drew.append(module)
        # A module may return something other than a batch.
        with contextlib.suppress(TypeError):
            dtypes.extend(t.dtype for t in tensors_of(output) if t.is_floating_point())

    hooks = [module.register_forward_pre_hook(before) for module in names]
    hooks += [module.register_forward_hook(after) for module in names]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return ForwardTraits(
        random_modules=tuple(names[m] for m in _innermost(dict.fromkeys(drew))),
        coupling_modules=tuple(tried_couplings(modules, run, num_samples)),
        narrowest_dtype=min(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=None),
    )


def _state() -> bytes:
    # As bytes: inside of `vmap`, tensors cannot be compared.
    return bytes(torch.default_generator.get_state().tolist())


def _innermost(found: dict[nn.Module, None]) -> Iterator[nn.Module]:
    """Yield the names without a child among them."""
    for module in found:
        if not any(child in found for child in module.modules() if child is not module):
            yield module


class RepeatedDraws:
    """Repeats random numbers in every forward: torch's for each sample, Python's and numpy's from a seed.

    Args:
        constant: torch draws one number everywhere, see `HeldDraws`.
        continues: Python and numpy continue from one forward to the next. Numbers that are drawn once for each sample,
            in order, are then the same in one batch and in several.
    """

    def __init__(self, *, constant: bool = False, continues: bool = False) -> None:
        self.seed = 0
        self.by_host = False
        self._torch = HeldDraws(constant=constant)
        self._continues = continues
        self._initial_state: tuple[int, ...] = ()
        self._final_states: dict[tuple[str, int], set[tuple[int, ...]]] = {}

    @property
    def differ_by_sample(self) -> bool:
        """Whether forwards of different numbers of samples drew differently often from Python or numpy."""
        return any(len(states) > 1 for states in self._final_states.values())

    @property
    def unknown(self) -> set[str]:
        """Names of torch's random operations that cannot be repeated."""
        return self._torch.unknown

    def held(self, seed: int) -> AbstractContextManager[object]:
        """Return a context in which torch's numbers are held."""
        self.seed = seed
        self._torch.restart()
        return self._torch

    def call(self, name: str, function: LossFunction, model: Any, batch: Batch) -> Any:  # noqa: ANN401 (as the user's)
        """Call a function of the user from the first random number on."""
        self._restart()
        output = function(model, batch)
        self._record(name)
        return output

    @contextmanager
    def applied_to(self, loss: Loss) -> Iterator[Loss]:
        """Yield the loss, each call of which draws the same numbers."""
        handles: list[Any] = []

        def repeated(name: str, function: LossFunction) -> LossFunction:
            if isinstance(function, nn.Module):  # its parameters train, so it stays a module; it is a copy
                handles.append(function.register_forward_pre_hook(lambda *_: self._restart()))
                handles.append(function.register_forward_hook(lambda *_: self._record(name)))
                return function
            return lambda model, batch: self.call(name, function, model, batch)

        changed = dataclasses.replace(loss, function=repeated("function", loss.function))
        if isinstance(loss.kind, AcrossSamples):
            kind = dataclasses.replace(loss.kind, encode=repeated("encode", loss.kind.encode))
            changed = dataclasses.replace(changed, kind=kind)
        try:
            yield changed
        finally:
            for handle in handles:
                handle.remove()

    def _restart(self) -> None:
        self._torch.restart()
        if not self._continues:
            seed_generators(self.seed)
        self._initial_state = host_random_digest()

    def _record(self, name: str) -> None:
        final_state = host_random_digest()
        self.by_host = self.by_host or final_state != self._initial_state
        self._final_states.setdefault((name, self.seed), set()).add(final_state)


def ways_of_drawing(*, by_host: bool) -> Iterator[Callable[[], RepeatedDraws]]:
    """Yield functions that make draws, in the order in which they are tried.

    Samples may be on another axis than the first, or draw in a loop: one number everywhere suits these.
    """
    for continues in (False, True) if by_host else (False,):
        for constant in (False, True):
            yield partial(RepeatedDraws, constant=constant, continues=continues)


_PARTS = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has."""


@dataclass(slots=True)
class GradientRuns:
    """A model, a loss and a batch of one number type, on the CPU."""

    model: Model  # a copy of the user's
    loss: Loss
    batch: Batch
    seed: int = 0
    norms: Policy | PolicyName | None = None
    in_evaluation: set[nn.Module] = field(default_factory=set)  # their behaviour in training was set aside
    draws: RepeatedDraws | None = None  # None: numbers come from seeded generators

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
        seed = self.seed if seed is None else seed
        with self._untouched(seed), nullcontext() if self.draws is None else self.draws.held(seed):
            return self._backward(self._value(self.loss, copied(self.batch)))

    def split(self, micro_batch_size: int, *, seed: int | None = None) -> Gradients:
        """Return the gradient that the engine adds up over micro-batches."""
        seed = self.seed if seed is None else seed
        with self._untouched(seed):
            if self.draws is None:
                return self._accumulated(self.loss, micro_batch_size, seed)
            with self.draws.held(seed), self.draws.applied_to(self.loss) as loss:
                return self._accumulated(loss, micro_batch_size, seed)

    def _accumulated(self, loss: Loss, micro_batch_size: int, seed: int) -> Gradients:
        engine = Engine(
            self.model,
            # `gradients` makes no update; SGD has no state to copy.
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

    def draws_by_sample(self, tolerance: float) -> bool:
        """Return whether numbers of Python or numpy belong to samples, so that no other batch can repeat them.

        To be asked after the un-split batch and a cut have run.
        """
        if self.draws is None or not self.draws.by_host:
            return False
        return self.draws.differ_by_sample or self._depends_on_order(tolerance)

    def _depends_on_order(self, tolerance: float) -> bool:
        """Whether the gradient changes in reverse order: states do not show numbers that were packed."""
        batch, number = read_samples(self.batch)
        before = self.batch, self.draws
        self.draws = RepeatedDraws(constant=True)
        try:
            expected = self.whole()
            self.batch = next(picked(batch, [range(number)[::-1]]))
            return not relative_error(self.whole(), expected) <= tolerance
        except Exception:  # noqa: BLE001 (batches of a class of the user's may be cut, and not put in another order)
            return True
        finally:
            self.batch, self.draws = before

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
            runs.has_aligned_draws = True  # `find_obstacle` has excluded others
            verdict = judge(runs, source)
            return (verdict, diagnose(runs, verdict)) if verdict.kind == "broken" else None

    def forward_traits(self) -> ForwardTraits:
        """Observe every module in one forward of the whole batch."""
        with self._untouched(self.seed):
            return find_traits(self.modules, lambda: self._output(copied(self.batch)), self.num_samples)

    def returns_a_number(self) -> bool:
        """Whether the loss function returns one number, and neither a sum with its count nor one loss per item."""
        with self._untouched(self.seed):  # gradients stay enabled, since the loss may use autograd
            output = self._output(copied(self.batch))
        return isinstance(output, torch.Tensor) and not output.dim()

    def changed_by_forward(self, tolerance: float) -> list[str] | None:
        """Return the buffers and attributes of modules that a forward changes and that affect the next gradient.

        None if a second forward gives the same gradient; an empty list if it does not, but the state is not in a
        module.
        """
        with self._untouched(self.seed) as draws:
            # All three forwards draw the same numbers, so that only kept state can make a difference.
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

    def _output(self, batch: Batch) -> Any:  # noqa: ANN401 (the result of the user's loss function)
        """Return the loss function's output for a batch as a whole."""
        encode = self.loss.kind.encode
        given = batch if encode is None else self._called("encode", encode, batch)
        return self._called("function", self.loss.function, given)

    def _called(self, name: str, function: LossFunction, batch: Batch) -> Any:  # noqa: ANN401 (as the user's)
        if self.draws is None:
            return function(self.model, batch)
        return self.draws.call(name, function, self.model, batch)

    def _value(self, loss: Loss, batch: Batch) -> torch.Tensor:
        """Return the loss of the whole batch, as declared."""
        counts = unit_counts(loss, batch, self.num_samples)
        output = self._output(batch)
        terms = scaled(loss, output, factors_of(loss, counts, counts, 1.0))
        value = torch.stack(terms).sum()
        if not loss.kind.brings_count:
            return value
        # An integer tensor would divide in float32, regardless of the type of the loss.
        return value * (self.num_samples / torch.as_tensor(returned_count(output)).to(torch.float64)).to(value.dtype)

    def _backward(self, value: torch.Tensor) -> Gradients:
        """Return the gradients that a backward adds to parameters, including gradients added by layers directly."""
        own = trainable(self.modules)
        for parameter in own.values():
            parameter.grad = None
        if value.requires_grad:
            try:
                torch.autograd.backward(value, inputs=list(own.values()))
            except RuntimeError as error:
                if (refused := refused_in_backward(error)) is not None:
                    raise refused from error
                raise
        # A parameter that no forward reaches has the gradient None.
        found = {name: parameter.grad for name, parameter in own.items()}
        for parameter in own.values():
            parameter.grad = None
        return found


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
    """Yield the current buffers and attributes of modules, by name."""
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


def _differs(one: Any, other: Any) -> bool:  # noqa: ANN401 (any attribute of a module)
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
