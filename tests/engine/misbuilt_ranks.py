"""Ranks that build other objects than their peers, have other data, or change state during the run."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.core.batch import Position
from tests.engine.misbehaving_ranks import Block, Misbehaviour, Program, Strategy

DIFFERS = "RanksDifferError: "


def other_builds() -> Iterator[Misbehaviour]:
    """Yield ranks that build other objects."""
    options: dict[str, Any] = {
        "check_loss": True,
        "measure_gradient_norm": False,
        "precision": "bf16",
        "clip": 1.0,
        "effective_batch_size": 8,
        "micro_batch_size": 1,
        "scheduler": None,
        "strategy": "auto",
    }
    for name, value in options.items():
        pattern = rf"RanksDifferError: .*{name}"
        yield Misbehaviour(name=f"built with another {name}", odd={name: value}, own=pattern, peers=pattern)
    losses: dict[str, Any] = {
        "a sum": lambda _: ab.sum_over_samples(_loss),
        "two terms": lambda _: ab.sum_of(_terms, a=ab.samples(), b=ab.samples()),
        "a joint loss": lambda _: ab.joint(lambda m, b: m(b["x"]), lambda _m, o: o.square().mean()),
    }
    pattern = "RanksDifferError: .*loss"
    for name, loss in losses.items():
        yield Misbehaviour(name=f"built with {name}", odd={"loss": loss}, own=pattern, peers=pattern)
    yield from _other_models()


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _terms(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    return {"a": _loss(model, batch), "b": _loss(model, batch)}


def _other_models() -> Iterator[Misbehaviour]:
    def frozen(program: Program) -> nn.Module:
        model = nn.Sequential(Block(program, 0), Block(program, 1), nn.Linear(6, 3))
        model[0].requires_grad_(False)
        return model

    models: dict[str, Callable[[Program], nn.Module]] = {
        "a frozen block": frozen,
        "one block less": lambda p: nn.Sequential(Block(p, 0), nn.Linear(6, 3)),
    }
    for name, model in models.items():
        pattern = "(ReplicaError|RanksDifferError): .*model|RanksDifferError: .*trainable"
        yield Misbehaviour(name=f"built with {name}", makes={"model": model}, own=pattern, peers=pattern)
    for made, value in {"optimizer class": _Plain, "lr": 1e-3}.items():
        pattern = "RanksDifferError: .*(optimizer|lr)"
        yield Misbehaviour(name=f"built with another {made}", makes={made: value}, own=pattern, peers=pattern)


class _Plain(torch.optim.SGD):
    """A different optimizer."""

    program: Program


def other_data() -> Iterator[Misbehaviour]:
    """Yield ranks with other data."""
    pattern = "DataError: rank . has another effective batch than rank"
    for name, value in {"data_seed": 1, "batch_size": 12, "size": 38}.items():
        yield Misbehaviour(name=f"loads with another {name}", makes={name: value}, own=pattern, peers=pattern)
    yield Misbehaviour(
        name="has fewer steps", makes={"steps": 3}, own=".*", peers=r".*rank 1 (has )?(ended|closed or dropped)|Differ"
    )
    yield Misbehaviour(
        name="reads NaN samples", makes={"factor": float("nan")}, own="NonFiniteError", peers="NonFiniteError"
    )


def _rate(program: Program) -> None:
    program.engine.optimizer.param_groups[0]["lr"] = 0.5


def _freeze(program: Program) -> None:
    next(iter(program.engine.model.parameters())).requires_grad_(False)  # type: ignore[union-attr]


def _weight(program: Program) -> None:
    with torch.no_grad():
        for parameter in program.engine.model.parameters():  # type: ignore[union-attr]
            parameter.mul_(1.5)


def _advance(program: Program) -> None:
    program.engine.scheduler.step()  # type: ignore[union-attr]


def _renumber(program: Program) -> None:
    program.engine.num_steps += 1


def _move(program: Program) -> None:
    program.engine.position = Position(0, 0)


def other_states() -> Iterator[Misbehaviour]:
    """Yield ranks that change state during the run."""
    settings = "RanksDifferError: .*(lr|scheduler|settings)"
    replicas: tuple[Strategy, ...] = ("all_reduce", "ddp", "zero1")
    yield Misbehaviour(name="sets another rate", place="between", act=_rate, own=settings, peers=settings)
    yield Misbehaviour(name="advances the scheduler", place="between", act=_advance, own=settings, peers=settings)
    yield Misbehaviour(name="renumbers its steps", place="between", act=_renumber, own=DIFFERS, peers=DIFFERS)
    yield Misbehaviour(
        name="sets another position", place="between", act=_move, own="finished|" + DIFFERS, peers="finished|" + DIFFERS
    )
    yield Misbehaviour(
        name="freezes a parameter",
        place="between",
        act=_freeze,
        own="ParameterError",
        peers="RankFailedError: .*ParameterError",
        strategies=replicas,
    )
    yield Misbehaviour(
        name="changes weights before it saves",
        place="save",
        step=1,
        act=_weight,
        own="ReplicaError",
        peers="ReplicaError",
        strategies=replicas,
    )
    yield from _other_forms(replicas)


def _other_forms(replicas: tuple[Strategy, ...]) -> Iterator[Misbehaviour]:
    """Yield ranks that save in another form; sharded is the usual form under fsdp."""
    forms: dict[str, dict[str, Any]] = {
        "sharded": {"sharded": True},
        "only_trainable": {"only_trainable": True},
        "wait": {"wait": False},
        "keep_last": {"keep_last": 5},
    }
    for name, form in forms.items():
        pattern = f"RanksDifferError: .*{name}"
        alike: tuple[Strategy, ...] = replicas if name == "sharded" else (*replicas, "fsdp")
        yield Misbehaviour(
            name=f"saves in another form, {name}", makes={"save": form}, own=pattern, peers=pattern, strategies=alike
        )
