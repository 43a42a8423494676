"""Forecasts against published scaling tables, with sources. Nothing is fitted: rates are published too.

Latencies were not published: 5 us over a network and 2 us within a host are assumed for all. Bandwidths are from the
hardware's data sheets. The number of bytes follows from the published model's float32 parameters, as transmitted.

    python benchmarks/published_scaling.py [--out benchmarks/results/NAME.md]
"""

from dataclasses import dataclass

import report

from anybatch.core.collectives import Link
from anybatch.core.geometry import SecondsFit
from anybatch.planner.forecast import forecast
from anybatch.planner.forecast_report import Cluster, Workload

NETWORK, WITHIN = 5e-6, 2e-6
NVLINK_V100, NVLINK_P100, PCIE = 150e9, 80e9, 12e9  # bytes/s in one direction: 6 links of 25, 4 of 20; PCIe 3.0 x16
MIB = 2**20


@dataclass(frozen=True)
class Published:
    """A published table: the rate of one device, and efficiencies against it or against a smaller world.

    Attributes:
        name: the model and the source of the table.
        rate: samples per second of one device.
        size: samples of a device and step.
        parameters: parameters of the model, in millions.
        gigabits: rate of a host's network, in Gbit/s.
        devices: devices per host.
        inner: bytes per second between devices of a host.
        efficiency: number of devices to published efficiency.
        against: number of devices whose rate is 100%.
        bucket_bytes: gradient bytes reduced together.
    """

    name: str
    rate: float
    size: int
    parameters: float
    gigabits: float
    devices: int
    inner: float
    efficiency: dict[int, float]
    against: int = 1
    bucket_bytes: int = 25 * MIB


DLPERF = "DLPerf 2020: hosts of 8 V100, 100 Gbit InfiniBand"
HOROVOD = "Horovod 2018: hosts of 4 P100, 25 Gbit RoCE"
GOYAL = "Goyal et al. 2017: hosts of 8 P100, 50 Gbit Ethernet"
SOURCES = (
    "DLPerf: github.com/Oneflow-Inc/DLPerf, NVIDIADeepLearningExamples/PyTorch, samples/s; ResNet-50 at 128 and",
    "BERT-base at 32 and 48 samples a device, float32; BERT reduces all gradients at once (`message_size=250000000`).",
    "Horovod: docs/benchmarks.rst and Sergeev, Del Balso 2018 (arXiv:1802.05799); 79% at 128 is from its first README.",
    "Goyal et al.: Accurate, Large Minibatch SGD (arXiv:1706.02677), about 90% from 8 to 256 devices.",
    "Of one P100, images/s are those of TensorFlow's own benchmarks (tensorflow.org/performance/benchmarks, DGX-1,",
    "synthetic data): 142 (Inception V3) and 154 (VGG-16) at 64 images, 195 (ResNet-50) at 32.",
    "None of it is what was measured above: other programs, NCCL, and links that are known by their names only.",
)
WHOLE = 1000 * MIB
TABLES = (
    Published(
        f"ResNet-50, {DLPERF}",
        367.29,
        128,
        25.6,
        100,
        8,
        NVLINK_V100,
        {8: 2887.65 / 8 / 367.29, 16: 5716.79 / 16 / 367.29, 32: 10917.09 / 32 / 367.29},
    ),
    Published(
        f"BERT-base, 32 samples, {DLPERF}",
        119.6,
        32,
        110,
        100,
        8,
        NVLINK_V100,
        {8: 921.32 / 8 / 119.6, 16: 1499.4 / 16 / 119.6, 32: 2885.81 / 32 / 119.6},
        bucket_bytes=WHOLE,  # message_size=250000000: all gradients in one reduction
    ),
    Published(
        f"BERT-base, 48 samples, {DLPERF}",
        121.94,
        48,
        110,
        100,
        8,
        NVLINK_V100,
        {8: 928.01 / 8 / 121.94, 16: 1584.32 / 16 / 121.94, 32: 3039.3 / 32 / 121.94},
        bucket_bytes=WHOLE,
    ),
    Published(f"Inception V3, {HOROVOD}", 142, 64, 23.8, 25, 4, PCIE, {512: 0.90}, bucket_bytes=64 * MIB),
    Published(f"VGG-16, {HOROVOD}", 154, 64, 138.4, 25, 4, PCIE, {128: 0.79, 512: 0.68}, bucket_bytes=64 * MIB),
    Published(f"ResNet-50, {GOYAL}", 195, 32, 25.6, 50, 8, NVLINK_P100, {256: 0.90}, against=8),
)


def forecast_efficiency(table: Published, num_ranks: int) -> float:
    """Return the forecast weak-scaling efficiency, with the faster reduction for each size."""
    workload = Workload(
        micro_batch=SecondsFit(0.0, 1 / table.rate),
        micro_batch_size=table.size,
        gradient_bytes=int(4e6 * table.parameters),
        bucket_bytes=table.bucket_bytes,
    )
    cluster = Cluster(
        link=Link(NETWORK, table.gigabits * 1e9 / 8),
        inner_link=Link(WITHIN, table.inner),
        devices_per_host=table.devices,
        control_link=Link(0.0, float("inf")),  # these programs do not send the engine's control messages
    )
    rates = {size: rate_at(workload, cluster, size) for size in (table.against, num_ranks)}
    return rates[num_ranks] / rates[table.against] * table.against / num_ranks


def rate_at(workload: Workload, cluster: Cluster, num_ranks: int) -> float:
    """Return samples per second on this many ranks."""
    rows = forecast(workload, cluster, world_size=max(2, num_ranks)).rows
    return next(row.samples_per_second for row in rows if row.world_size == num_ranks)


def published_lines() -> list[str]:
    """Return the table of published and forecast efficiencies."""
    lines = ["| published | devices | efficiency | forecast | error |", "|---|--:|--:|--:|--:|"]
    for table in TABLES:
        for num_ranks, efficiency in table.efficiency.items():
            said = forecast_efficiency(table, num_ranks)
            lines.append(
                f"| {table.name} | {num_ranks} | {efficiency:.0%} | {said:.0%} | {said / efficiency - 1:+.0%} |"
            )
    return [*lines, "", *SOURCES]


def main() -> None:
    """Print the table."""
    given = report.parser(__doc__).parse_args()
    report.publish(
        published_lines(),
        title="Forecasts against published scaling tables",
        command="python benchmarks/published_scaling.py",
        setting="no measurement: formulas, and what others have published",
        out=given.out,
    )


if __name__ == "__main__":
    main()
