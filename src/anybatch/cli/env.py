"""`anybatch env`: versions and hardware for a bug report, without personal data."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import anybatch
from anybatch.cli.command import Parser, print_report
from anybatch.parallel.launchers import usable_cores

_PACKAGES = ("torch", "numpy", "jaxtyping")


@dataclass(frozen=True, slots=True)
class Environment:
    """The versions and the hardware."""

    software: Mapping[str, str]
    hardware: Mapping[str, str]

    def __str__(self) -> str:
        """Return one fact per line."""
        facts = {**self.software, **self.hardware}
        width = max(map(len, facts))
        return "\n".join(f"{name:<{width}}  {fact}" for name, fact in facts.items())


def run(argv: Sequence[str]) -> int:
    """Run `anybatch env` and return the exit status."""
    args = make_parser().parse(argv)
    found = Environment(software(), hardware())
    return print_report(str(found), found, args)


def make_parser() -> Parser:
    """Return the parser of this command."""
    return Parser("env", "Print versions and hardware for a bug report, without names of users, hosts or folders.")


def software() -> dict[str, str]:
    """Return the versions of Python, torch and the system."""
    return {
        "anybatch": anybatch.__version__,
        **{name: _version(name) for name in _PACKAGES},
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()} ({platform.machine()})",
    }


def hardware() -> dict[str, str]:
    """Return the devices of this machine and the communication backends."""
    import torch
    import torch.distributed as dist

    num_devices = torch.accelerator.device_count()
    facts = {
        "cpu cores": f"{os.cpu_count()} ({usable_cores()} usable), {torch.get_num_threads()} torch threads",
        "memory": _memory(),
        "accelerators": ", ".join(_device(number) for number in range(num_devices)) or "none",
        "cuda of torch": torch.version.cuda or "none",
        "hip of torch": torch.version.hip or "none",
        "gloo": "yes" if dist.is_available() and dist.is_gloo_available() else "no",
        "nccl": "no",
    }
    if dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available():
        from torch.cuda import nccl

        facts["nccl"] = ".".join(map(str, nccl.version()))
    return facts


def _device(number: int) -> str:
    import torch

    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    kind = accelerator.type
    if kind != "cuda":
        return f"{kind}:{number}"
    found = torch.cuda.get_device_properties(number)
    free_bytes, _ = torch.cuda.mem_get_info(number)
    return f"{found.name} ({found.total_memory / 2**30:.1f} GiB, {free_bytes / 2**30:.1f} free)"


def _memory() -> str:
    """Return the total and the free memory of the machine."""
    try:
        page_bytes, total, free = (os.sysconf(f"SC_{name}") for name in ("PAGE_SIZE", "PHYS_PAGES", "AVPHYS_PAGES"))
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf, and macOS does not know all names
        return "unknown"
    return f"{total * page_bytes / 2**30:.1f} GiB, {free * page_bytes / 2**30:.1f} free"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
