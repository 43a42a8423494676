"""Strategies with options, for `Engine(strategy=...)`; without options, pass a name such as "ddp"."""

from anybatch.parallel.all_reduce import AllReduce
from anybatch.parallel.data_parallel import DataParallel
from anybatch.parallel.ddp import DDP
from anybatch.parallel.fsdp import FSDP
from anybatch.parallel.sharding import Sharding
from anybatch.parallel.single import Single
from anybatch.parallel.zero1 import Zero1

__all__ = ["DDP", "FSDP", "AllReduce", "DataParallel", "Sharding", "Single", "Zero1"]
