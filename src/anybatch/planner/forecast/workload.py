"""What a forecast starts from: the times of one rank, and the network between ranks."""

import math
from dataclasses import dataclass
from typing import Literal

from anybatch.core.collective_times import Link
from anybatch.core.geometry import ceil_div
from anybatch.core.size_choice import SecondsFit
from anybatch.core.whole_numbers import checked_int
from anybatch.errors import UserError

StrategyName = Literal["all_reduce", "ddp", "zero1", "fsdp"]
Scaling = Literal["strong", "weak"]
FsdpReduction = Literal["every_micro_batch", "last_micro_batch"]
Algorithm = Literal["best", "ring", "tree", "gloo"]

BACKWARD_SHARE = 2 / 3
"""A backward has two products for each of the forward's, one for inputs and one for weights."""
CONTROL_LATENCY_SECONDS = 100e-6
"""The least latency of a round of the control plane: one of many between two namespaces of one machine, whose cores
others used (benchmarks/control_plane.py). Of that TCP takes 30 us (benchmarks/results/several_hosts_cpu_2026-11-24.md),
threads that wake each other and Python the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained, and how long one rank takes for it.

    Attributes:
        micro_batch: seconds of forward and backward by the samples of a micro-batch.
        micro_batch_size: the most samples of a micro-batch.
        gradient_bytes: of one copy of all gradients, as they travel.
        effective_batch_size: samples of a step over all ranks; None where each rank has a share of its own size.
        accumulation_steps: micro-batches of a rank's share; None, with an effective batch size, for as few as go.
        update_seconds: of the optimizer, on a rank that updates all parameters.
        bucket_bytes: gradient bytes that are reduced together; FSDP gathers as many bytes of weights together.
        backward_share: the backward's part of a micro-batch's seconds.
        variation: standard deviation of the seconds that ranks need for their shares, by their mean.
        num_parameters: tensors that have a gradient; the last message of a step has a flag for each.
        counts_need_data: the loss counts tokens, or others that only data tells, so that ranks agree before a step.

    Raises:
        UserError: a number is out of its range, or neither size nor steps say how large a share is.
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
            message = f"a micro-batch of {self.micro_batch_size} samples must take some time, and {self.micro_batch}."
            raise UserError(message)

    @property
    def scaling(self) -> Scaling:
        """Strong: the effective batch stays. Weak: the share of a rank stays, and the effective batch grows."""
        return "weak" if self.effective_batch_size is None else "strong"

    @property
    def buckets(self) -> tuple[int, ...]:
        """Return the bytes of each bucket, in backward order: full ones, and what is left in the last."""
        full, rest = divmod(self.gradient_bytes, self.bucket_bytes)
        return (self.bucket_bytes,) * full + ((rest,) if rest else ())

    def share(self, num_ranks: int) -> tuple[int, int, int]:
        """Return samples of the largest rank share, micro-batches of it, and samples of a micro-batch.

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
        link: of a host.
        inner_link: between the devices of a host; None where it has one.
        devices_per_host: devices that share the host's link.
        algorithm: how gradients are all-reduced over hosts: a "ring", a "tree", the "best" of these for each size, or
            "gloo", the ring as gloo runs it, which alone was compared with measurements.
        control_link: between processes of the control plane; None for `link`, with at least TCP's latency.

    Raises:
        UserError: a host has several devices, and there is no inner link; or gloo is to know of hosts.
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
                f"{self.devices_per_host} devices of a host talk over a link that is not known. Name it: "
                "inner_link=Link(...), or --inner-link 300GB/s,2us."
            )
            raise UserError(message)
        if self.devices_per_host > 1 and self.algorithm == "gloo":
            message = (
                f"gloo's ring knows of no hosts, and {self.devices_per_host} devices per host were named. Use "
                "devices_per_host=1, or another algorithm."
            )
            raise UserError(message)

    @property
    def control(self) -> Link:
        """The link of the control plane."""
        if self.control_link is not None:
            return self.control_link
        return Link(max(CONTROL_LATENCY_SECONDS, self.link.latency_seconds), self.link.bytes_per_second)
