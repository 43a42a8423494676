"""Random numbers that a loss draws itself, drawn once for all samples: a piece gets the rows of its own samples.

Without it a loss that draws (the noise and the times of a diffusion model, dropout behind the model) could not be
compared on pieces of a batch: each piece would draw numbers of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_DRAWS = frozenset(
    {
        torch.bernoulli,
        torch.normal,
        torch.poisson,
        torch.rand,
        torch.rand_like,
        torch.randint,
        torch.randint_like,
        torch.randn,
        torch.randn_like,
    }
)
_IN_PLACE = frozenset(
    {
        torch.Tensor.bernoulli_,
        torch.Tensor.exponential_,
        torch.Tensor.log_normal_,
        torch.Tensor.normal_,
        torch.Tensor.random_,
        torch.Tensor.uniform_,
    }
)
_DROPOUT = frozenset({F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout})


class SharedDraws:
    """Keeps what was drawn for all samples, in the order in which it was, and hands out rows of it."""

    def __init__(self) -> None:
        self._drawn: list[torch.Tensor] | None = None

    @contextmanager
    def of(self, start: int, stop: int) -> Iterator[None]:
        """Let what draws meanwhile get the rows of samples `start` to `stop`; the first time they are all samples."""
        if self._drawn is None:
            kept = self._drawn = []

            def keep(drawn: torch.Tensor) -> torch.Tensor:
                kept.append(drawn.detach().clone())
                return drawn

            with _Drawing(keep):
                yield
            return
        left = iter(self._drawn)

        def rows(drawn: torch.Tensor) -> torch.Tensor:
            whole = next(left, None)
            for known in () if whole is None else (whole, whole[start:stop] if whole.dim() else whole):
                if known.shape == drawn.shape and known.dtype == drawn.dtype:
                    return known.clone()
            return drawn  # of another form: it stays what the piece draws itself

        with _Drawing(rows):
            yield


class _Drawing(TorchFunctionMode):
    """Passes what is drawn through a function."""

    def __init__(self, through: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._through = through

    def __torch_function__(
        self,
        function: Any,  # noqa: ANN401 (whatever torch's functions take and return)
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        named: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (the same)
        del types
        named = named or {}
        if function in _DROPOUT and args:
            # Drawn apart from what it is applied to, which has a gradient.
            inner, *rest = args
            mask = function(
                torch.ones_like(inner), *rest, **{name: value for name, value in named.items() if name != "inplace"}
            )
            return inner * self._through(mask)
        drawn = function(*args, **named)
        if function in _DRAWS and isinstance(drawn, torch.Tensor) and named.get("out") is None:
            return self._through(drawn)
        if function in _IN_PLACE:
            with torch.no_grad():
                drawn.copy_(self._through(drawn))
        return drawn
