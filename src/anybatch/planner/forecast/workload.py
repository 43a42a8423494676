"""Inputs of a forecast: the times of one rank, and the network between ranks."""

import math
from dataclasses import dataclass
from typing import Literal

from anybatch.core.collectives import Link
from anybatch.core.geometry import SecondsFit, ceil_div, checked_int
from anybatch.errors import UserError

StrategyName = Literal["all_reduce", "ddp", "zero1", "fsdp"]
Scaling = Literal["strong", "weak"]
FsdpReduction = Literal["every_micro_batch", "last_micro_batch"]
Algorithm = Literal["best", "ring", "tree", "gloo"]

BACKWARD_SHARE = 2 / 3
"""A backward has two products for each product of the forward, one for inputs and one for weights."""
CONTROL_LATENCY_SECONDS = 100e-6
"""Minimum latency of a control-plane round, measured between two network namespaces of a busy machine
(benchmarks/control_plane.py). TCP accounts for 30 us (benchmarks/results/several_hosts_cpu_2026-11-24.md), waking
threads and Python for the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of a training step, and the times of one rank.

    Attributes:
        micro_batch: seconds of forward and backward as a function of the samples of a micro-batch.
        micro_batch_size: maximum samples of a micro-batch.
        gradient_bytes: bytes of one copy of all gradients, as communicated.
        effective_batch_size: samples of a step over all ranks; None if shares do not depend on the number of ranks.
        accumulation_steps: micro-batches of a rank share; None for as few as possible.
        update_seconds: time of the optimizer on a rank that updates all parameters.
        bucket_bytes: size of a bucket of gradients, and of the weights that FSDP gathers together.
        backward_share: share of the backward in a micro-batch's time.
        variation: standard deviation of the ranks' times for their shares, relative to the mean.
        num_parameters: number of tensors with a gradient; the last message of a step has a flag for each.
        counts_need_data: the loss counts tokens or other items in the data, so ranks exchange counts before a step.

    Raises:
        UserError: a number is out of range.
    """

    micro_batch: SecondsFit
    micro_batch_size: int
    gradient_bytes: int
    effective_batch_size: int | None = None
    accumulation_steps: int | None = None
    update_seconds: float = 0.0
    bucket_bytes: int = 25 * 2**20
    backward_share: float = BACKWARD_SHARE
    variation: float = 0.0
    num_parameters: int = 100
    counts_need_data: bool = False

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "gradient_bytes", "bucket_bytes", "num_parameters"):
            checked_int(name, getattr(self, name))
        for name in ("effective_batch_size", "accumulation_steps"):
            if getattr(self, name) is not None:
                checked_int(name, getattr(self, name))
        for name in ("update_seconds", "variation", "backward_share"):
            value, most = getattr(self, name), 1.0 if name == "backward_share" else math.inf
            if not 0.0 <= value <= most:
                message = f"{name}={value} must be a number from 0 to {most}."
                raise UserError(message)
        if not 0.0 < self.micro_batch.seconds(self.micro_batch_size) < math.inf:
            message = f"a micro-batch of {self.micro_batch_size} samples must take a positive time: {self.micro_batch}."
            raise UserError(message)

    @property
    def scaling(self) -> Scaling:
        """Strong: the effective batch is fixed. Weak: the rank share is fixed, and the effective batch grows."""
        return "weak" if self.effective_batch_size is None else "strong"

    @property
    def buckets(self) -> tuple[int, ...]:
        """Bytes of each bucket, in backward order: full ones, then the rest."""
        full, rest = divmod(self.gradient_bytes, self.bucket_bytes)
        return (self.bucket_bytes,) * full + ((rest,) if rest else ())

    def share(self, num_ranks: int) -> tuple[int, int, int]:
        """Return the samples of the largest rank share, its number of micro-batches, and their size.

        In strong scaling the share is cut into `accumulation_steps` parts, or into as few as fit.
        """
        if self.effective_batch_size is None:
            steps = self.accumulation_steps or 1
            return steps * self.micro_batch_size, steps, self.micro_batch_size
        share = ceil_div(self.effective_batch_size, num_ranks)
        steps = min(share, max(self.accumulation_steps or 1, ceil_div(share, self.micro_batch_size)))
        size = ceil_div(share, steps)
        return share, ceil_div(share, size), size

    def samples(self, num_ranks: int) -> int:
        """Return the samples of a step over all ranks."""
        return self.effective_batch_size or num_ranks * self.share(num_ranks)[0]

    def micro_batch_seconds(self, num_ranks: int) -> tuple[float, ...]:
        """Return the seconds of each micro-batch of the largest share; the last one may be smaller."""
        share, steps, size = self.share(num_ranks)
        return (self.micro_batch.seconds(size),) * (steps - 1) + (self.micro_batch.seconds(share - (steps - 1) * size),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The network between ranks, and how collectives use it.

    Attributes:
        link: link of a host.
        inner_link: link between the devices of a host; None for one device per host.
        devices_per_host: devices that share the host's link.
        algorithm: all-reduce algorithm over hosts: "ring", "tree", "best" (of these for each size), or "gloo" (gloo's
            ring, the only one compared with measurements).
        control_link: link of the control plane; None for `link` with at least `CONTROL_LATENCY_SECONDS`.

    Raises:
        UserError: hosts have several devices but no inner link, or use gloo.
    """

    link: Link
    inner_link: Link | None = None
    devices_per_host: int = 1
    algorithm: Algorithm = "best"
    control_link: Link | None = None

    def __post_init__(self) -> None:
        checked_int("devices_per_host", self.devices_per_host)
        if self.devices_per_host > 1 and self.inner_link is None:
            message = (
                f"the link between the {self.devices_per_host} devices of a host is missing. Set inner_link=Link(...), "
                "or --inner-link 300GB/s,2us."
            )
            raise UserError(message)
        if self.devices_per_host > 1 and self.algorithm == "gloo":
            message = (
                f"algorithm='gloo' does not support devices_per_host={self.devices_per_host}. Use devices_per_host=1 "
                "or another algorithm."
            )
            raise UserError(message)

    @property
    def control(self) -> Link:
        """The link of the control plane."""
        if self.control_link is not None:
            return self.control_link
        return Link(max(CONTROL_LATENCY_SECONDS, self.link.latency_seconds), self.link.bytes_per_second)
