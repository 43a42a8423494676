"""Ranks that build other objects than their peers, have other data, or change state during the run."""

from collections.abc import Callable, Iterator
from typing import Any, get_args

import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.core.batch import Position
from anybatch.core.records import Observers
from anybatch.engine.gradient_noise import GradientNoise
from anybatch.parallel.all_reduce import AllReduce
from anybatch.parallel.ddp import DDP
from tests.engine.misbehaving_ranks import Block, Misbehaviour, Program, Strategy

DIFFERS = "RanksDifferError: "


def other_builds() -> Iterator[Misbehaviour]:
    """Yield ranks that build other objects."""
    options: dict[str, Any] = {
        "check_loss": True,
        "measure_gradient_norm": False,
        "precision": "bf16",
        "clip": 1.0,
        "average_decay": 0.9,
        "norms": "keep",
        "noise": GradientNoise(),
        "rng": "per_sample",
        "seed": 5,
        "spikes": "warn",
        "bf16_weights": "split",
        "effective_batch_size": 8,
        "micro_batch_size": 1,
        "accumulation_steps": 3,
        "deal": "fixed",
        "scheduler": None,
        "buffers": {"none": "mean"},
        "strategy": "auto",
    }
    for name, value in options.items():
        peers = rf"RanksDifferError: .*{name}"
        odd: dict[str, Any] = {name: value}
        if name == "accumulation_steps":
            odd["micro_batch_size"], peers = None, "RanksDifferError: .*(accumulation_steps|micro_batch_size)"
        yield Misbehaviour(name=f"built with another {name}", odd=odd, own=peers, peers=peers)
    for name, kind in {"ddp": DDP, "all_reduce": AllReduce}.items():
        yield Misbehaviour(
            name=f"built with {name}'s other buckets",
            odd={"strategy": kind(bucket_bytes=64)},
            common={"strategy": kind()},
            own="RanksDifferError: .*strategy",
            peers="RanksDifferError: .*strategy",
            strategies=("all_reduce",),
        )
    for strategy in get_args(Strategy):
        yield Misbehaviour(
            name=f"built with {strategy}",
            odd={"strategy": strategy},
            own="RanksDifferError: .*strategy",
            peers="RanksDifferError: .*strategy",
            strategies=tuple(one for one in get_args(Strategy) if one != strategy),
        )
    yield from _other_losses()
    yield from _other_models()
    yield Misbehaviour(
        name="built with an observer that the others lack", common={"observer": None}, odd={"observer": Observers()}
    )


def _other_losses() -> Iterator[Misbehaviour]:
    def value(m: Any, b: Any) -> torch.Tensor:
        return F.cross_entropy(m(b["x"]), b["y"])

    def terms(m: Any, b: Any) -> dict[str, torch.Tensor]:
        return {"a": value(m, b), "b": value(m, b)}

    losses: dict[str, Any] = {
        "a sum": lambda _: ab.sum_over_samples(value),
        "a bare function": lambda _: value,
        "a mean over items": lambda _: ab.mean_over(value, lambda b: torch.tensor(len(b["y"]))),
        "two terms": lambda _: ab.sum_of(terms, a=ab.samples(), b=ab.samples()),
        "a joint loss": lambda _: ab.joint(lambda m, b: m(b["x"]), lambda _m, o: o.square().mean()),
    }
    pattern = "RanksDifferError: .*loss"
    for name, loss in losses.items():
        yield Misbehaviour(name=f"built with {name}", odd={"loss": loss}, own=pattern, peers=pattern)
    weighted = [{"loss": lambda _, w=w: ab.sum_of(terms, a=ab.samples(), b=ab.samples(weight=w))} for w in (1.0, 0.5)]
    yield Misbehaviour(
        name="built with another weight of a term", common=weighted[0], odd=weighted[1], own=pattern, peers=pattern
    )


def _other_models() -> Iterator[Misbehaviour]:
    def frozen(program: Program) -> nn.Module:
        model = nn.Sequential(Block(program, 0), Block(program, 1), nn.Linear(6, 3))
        model[0].requires_grad_(False)
        return model

    models: dict[str, Callable[[Program], nn.Module]] = {
        "a frozen block": frozen,
        "a wider layer": lambda p: nn.Sequential(Block(p, 0), Block(p, 1), nn.Linear(6, 4)),
        "one block less": lambda p: nn.Sequential(Block(p, 0), nn.Linear(6, 3)),
        "other types": lambda p: nn.Sequential(Block(p, 0), Block(p, 1), nn.Linear(6, 3)).double(),
        "other names": lambda p: nn.ModuleDict({"a": Block(p, 0), "b": Block(p, 1), "c": nn.Linear(6, 3)}),
    }
    for name, model in models.items():
        pattern = "(ReplicaError|RanksDifferError): .*model|RanksDifferError: .*trainable"
        yield Misbehaviour(name=f"built with {name}", makes={"model": model}, own=pattern, peers=pattern)

    def other_values(program: Program) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(Block(program, 0), Block(program, 1), nn.Linear(6, 3))

    yield Misbehaviour(name="built with other values", makes={"model": other_values})
    yield Misbehaviour(
        name="built with another optimizer",
        makes={"optimizer class": _Plain},
        own="RanksDifferError: .*optimizer",
        peers="RanksDifferError: .*optimizer",
    )
    yield Misbehaviour(
        name="built with another learning rate",
        makes={"lr": 1e-3},
        own="RanksDifferError: .*lr",
        peers="RanksDifferError: .*lr",
    )


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
    for name, factor in {"NaN": float("nan"), "infinite": float("inf")}.items():
        yield Misbehaviour(
            name=f"reads {name} samples", makes={"factor": factor}, own="NonFiniteError", peers="NonFiniteError"
        )
    yield Misbehaviour(
        name="reads samples of another width",
        makes={"features": 7},
        own="DataError: .*other samples",
        peers="DataError: .*other samples",
    )


def _rate(program: Program) -> None:
    program.engine.optimizer.param_groups[0]["lr"] = 0.5


def _freeze(program: Program) -> None:
    next(iter(program.engine.model.parameters())).requires_grad_(False)  # type: ignore[union-attr]


def _weight(program: Program) -> None:
    with torch.no_grad():
        for parameter in program.engine.model.parameters():  # type: ignore[union-attr]
            parameter.mul_(1.5)


def _gradients(program: Program) -> None:
    for parameter in program.engine.model.parameters():  # type: ignore[union-attr]
        parameter.grad = torch.ones_like(parameter)


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
    yield Misbehaviour(name="leaves gradients behind", place="between", act=_gradients, strategies=replicas)
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
