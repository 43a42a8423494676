"""A stand-in for a model: it is called as the model is, and answers with rows of what the model has answered once.

With it a loss function can be run on some samples of a batch as if the model had seen the whole batch, so that what
the network does to its samples (dropout, BatchNorm) is the same for all of them, and only the loss is left to look at.
"""

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from anybatch.core.tree import map_tensors, tensors_of
from anybatch.engine.torch_internals import module_parts, uncompiled, with_parts

_PARTS = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
Axes = tuple[tuple[int, int], ...]
"""Where the samples are in a tensor: each axis along which they lie, and how many entries of it a sample has."""


class UndecidedError(Exception):
    """Nothing can be said about a loss from these samples; carries the reason, a clause."""


class HarmlessError(UndecidedError):
    """Nothing can be said, for a reason that is no sign of a fault: nothing counts here, or chance alone decides."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a module: which one, what it returned, and the tensors in that."""

    module: nn.Module
    returned: Any
    tensors: tuple[torch.Tensor, ...]


class RecordedModel:
    """A model whose modules share everything with the user's but the calls, which are recorded or replayed.

    It is made of shallow copies of the user's modules, of the same classes, so attributes, methods, submodules and
    `isinstance` work, and nothing is patched. Parameters are aliases: they share memory, and no hook hangs on them.

    Args:
        model: the user's module, or a mapping of named ones.
        opened: ids of modules whose calls are not recorded: their forward runs, and calls what stands for its children.
    """

    def __init__(self, model: nn.Module | Mapping[str, nn.Module], opened: Collection[int]) -> None:
        self._opened = opened
        self._clones: dict[int, nn.Module] = {}
        self._originals: dict[int, nn.Module] = {}
        self._aliases: dict[int, nn.Parameter] = {}
        self._answer: Callable[..., Any] = _not_running
        self.model = (
            self.clone(model)
            if isinstance(model, nn.Module)
            else {name: self.clone(module) for name, module in model.items()}
        )

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The aliases of all trainable parameters."""
        return [alias for alias in self._aliases.values() if alias.requires_grad]

    def clone(self, module: nn.Module) -> nn.Module:
        """Return the recorded model of a module; of a compiled one, of the module that was compiled."""
        module = uncompiled(module)
        if id(module) in self._clones:
            return self._clones[id(module)]
        # Past `__init__`, whose arguments are not known here; the attributes are taken over below.
        clone: nn.Module = object.__new__(type(module))
        self._clones[id(module)] = clone
        self._originals[id(module)] = module
        parameters, children = module_parts(module)
        is_opened = id(module) in self._opened
        vars(clone).update(
            with_parts(
                vars(module),
                {name: self._alias(value) for name, value in parameters.items()},
                {name: None if child is None else self.clone(child) for name, child in children.items()},
                # An opened module runs its own forward; hooks around a recorded answer would see none.
                keeps_forward_hooks=is_opened,
            )
        )
        if not is_opened:
            # Weak, so that what was recorded is freed with its last user, before the step's own forward.
            vars(clone)["forward"] = functools.partial(_call, weakref.WeakMethod(self._called), module)
        return clone

    def record(self, run: Callable[[], object]) -> tuple[Call, ...]:
        """Run something that calls the recorded model, with the user's own modules behind it; return their calls.

        What modules compute and keep for the loss function to read (the balance of a router) is no answer to a call,
        so it cannot be replayed: whoever reads it from now on gets something that it cannot compute with.
        """
        calls: list[Call] = []
        before = {key: _kept(module) for key, module in self._originals.items()}

        def answer(module: nn.Module, *args: Any, **named: Any) -> Any:  # noqa: ANN401 (the module's)
            returned = module(*args, **named)
            calls.append(Call(module, returned, tuple(tensor.detach() for tensor in tensors_of(returned))))
            return map_tensors(returned, torch.clone)  # what is changed in place must not change the recording

        self._answer = answer
        try:
            run()
        finally:
            self._answer = _not_running
        for key, module in self._originals.items():
            if key not in self._opened:
                computed = _kept(module)
                changed = [name for name, ids in computed.items() if ids != before[key].get(name)]
                vars(self._clones[key]).update(dict.fromkeys(changed, _COMPUTED))
        return tuple(calls)

    def replay(
        self, calls: Sequence[Call], answers: Sequence[Sequence[torch.Tensor]], run: Callable[[], Any]
    ) -> tuple[Any, list[list[torch.Tensor]]]:
        """Run something that calls the recorded model, which gives `answers` in the order of the recorded calls.

        Returns:
            What `run` returned, and for every call those of its arguments that follow from earlier answers.

        Raises:
            UndecidedError: other calls are made than were recorded.
        """
        left = iter(zip(calls, answers, strict=True))
        inputs: list[list[torch.Tensor]] = []

        def answer(module: nn.Module, *args: Any, **named: Any) -> Any:  # noqa: ANN401 (the module's)
            call, tensors = next(left, (None, ()))
            if call is None or call.module is not module:
                raise _other_calls()
            inputs.append([one.detach() for one in tensors_of((args, named)) if one.requires_grad])
            values = iter(tensors)
            # Copies, because the loss may change in place what the model has returned.
            return map_tensors(call.returned, lambda _: next(values).clone())

        self._answer = answer
        try:
            found = run()
        finally:
            self._answer = _not_running
        if next(left, None) is not None:
            raise _other_calls()
        return found, inputs

    def _called(self, module: nn.Module, *args: Any, **named: Any) -> Any:  # noqa: ANN401 (the module's)
        return self._answer(module, *args, **named)

    def _alias(self, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None:
            return None
        if id(parameter) not in self._aliases:
            self._aliases[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        return self._aliases[id(parameter)]


class _Computed:
    """Stands for what a module has computed and kept; it has no operators, and no attributes."""


_COMPUTED = _Computed()


def _kept(module: nn.Module) -> dict[str, list[int]]:
    """Return the identities of the tensors that a module keeps, in lists and dicts too, by attribute."""
    found = {}
    for name, value in vars(module).items():
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        tensors = [id(one) for one in values if isinstance(one, torch.Tensor)]
        if tensors and name not in _PARTS:
            found[name] = tensors
    return found


class RecordedRows:
    """One recorded tensor, of which the rows of some samples can be had.

    Args:
        tensor: what a module returned for all samples.
        axes: where the samples are in it; empty if it has none.
        num_samples: how many there are.
        interleaved: a sample's several entries along an axis lie apart (all samples' first ones, all their second
            ones), as `torch.cat([one_view, other_view])` leaves them; otherwise side by side.
    """

    def __init__(self, tensor: torch.Tensor, axes: Axes, num_samples: int, *, interleaved: bool) -> None:
        self._axes = axes
        self._of_samples = [axis + place + interleaved for place, (axis, _) in enumerate(axes)]
        for axis, entries in reversed(axes):
            tensor = tensor.unflatten(axis, (entries, num_samples) if interleaved else (num_samples, entries))
        self._tensor = tensor

    @property
    def has_samples(self) -> bool:
        """Whether there are rows at all."""
        return bool(self._axes)

    def between_samples(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the entries that belong to two samples, in a matrix of all with all, say."""
        found = gradient.clone()
        if len(self._of_samples) < 2:  # noqa: PLR2004 (pairs)
            return found.zero_()
        for number in range(gradient.shape[self._of_samples[0]]):
            self.window(found, number, number + 1).zero_()
        return found

    def leaf(self, start: int, stop: int, *, wide: bool) -> torch.Tensor:
        """Return the rows of samples `start` to `stop` as a leaf, in float32 at least if `wide`."""
        found = self.window(self._tensor, start, stop).detach().clone()
        if wide and found.is_floating_point() and found.dtype.itemsize < torch.float32.itemsize:
            found = found.float()
        return found.requires_grad_() if found.is_floating_point() or found.is_complex() else found

    def window(self, like: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return a view of those rows of a tensor with the axes of a whole leaf."""
        for axis in self._of_samples:
            like = like.narrow(axis, start, stop - start)
        return like

    def mixed(self, leaf: torch.Tensor, first: int) -> torch.Tensor:
        """Return a whole leaf in which every sample from `first` on has been mixed with sample 0."""
        if not self.has_samples or not leaf.requires_grad:
            return leaf
        axis = self._of_samples[0]
        others = leaf.narrow(axis, first, leaf.shape[axis] - first)
        mixed = 0.7 * others + 0.3 * leaf.narrow(axis, 0, 1)
        return torch.cat([leaf.narrow(axis, 0, first), mixed], axis).detach().requires_grad_()

    def shaped(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return a leaf in the shape in which the module would have returned it."""
        for axis, _ in self._axes:
            leaf = leaf.flatten(axis, axis + 1)
        return leaf


def sample_axes(
    calls: Sequence[Call], num_samples: int, others: Sequence[Call] | None, num_others: int
) -> list[list[Axes]]:
    """Return where the samples are in every recorded tensor.

    Args:
        calls: what was recorded for `num_samples`.
        num_samples: how many samples that were.
        others: the same for `num_others` samples: an axis that has grown with them is one of samples. Without them
            the first axis is taken for it where it is the only one of that length.
        num_others: how many samples those were.

    Raises:
        UndecidedError: without `others` the axis is ambiguous; or these are other calls.
    """
    if others is None:
        return [[_likely_axes(tensor, num_samples) for tensor in call.tensors] for call in calls]
    if [_form(call) for call in calls] != [_form(call) for call in others]:
        raise _other_calls()
    return [
        [
            _grown_axes(one.shape, num_samples, other.shape, num_others)
            for one, other in zip(call.tensors, again.tensors, strict=True)
        ]
        for call, again in zip(calls, others, strict=True)
    ]


def _likely_axes(tensor: torch.Tensor, num_samples: int) -> Axes:
    sizes = tuple(tensor.shape)
    if sizes[:1] == (num_samples,) and num_samples not in sizes[1:]:
        return ((0, 1),)
    if any(size % num_samples == 0 for size in sizes):
        message = "it is ambiguous which axis of the model's output is that of the samples"
        raise UndecidedError(message)
    return ()


def _grown_axes(sizes: Sequence[int], num_samples: int, others: Sequence[int], num_others: int) -> Axes:
    return tuple(
        (axis, size // num_samples)
        for axis, (size, other) in enumerate(zip(sizes, others, strict=True))
        if size and size % num_samples == 0 and size // num_samples * num_others == other
    )


def _form(call: Call) -> tuple[int, list[int]]:
    return id(call.module), [tensor.dim() for tensor in call.tensors]


def _other_calls() -> UndecidedError:
    return UndecidedError("the loss function calls the model in another way for another number of samples")


def _call(called: "weakref.WeakMethod[Callable[..., Any]]", *args: Any, **named: Any) -> Any:  # noqa: ANN401
    method = called()
    assert method is not None, "the recorded model lives as long as what replays it"
    return method(*args, **named)


def _not_running(*_: object, **__: object) -> Any:  # noqa: ANN401 (never returns)
    message = "the recorded model of a model was called after the loss function had returned"
    raise UndecidedError(message)


def modules_in(model: object) -> Iterator[nn.Module]:
    """Yield every module of a module or of a mapping of named ones, as recorded models know them."""
    roots = model.values() if isinstance(model, Mapping) else [model]
    for root in roots:
        if isinstance(root, nn.Module):
            yield from (uncompiled(module) for module in root.modules())
