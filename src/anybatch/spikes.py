"""Spikes of the loss and of the gradient norm: watched in a run with `Engine(spikes=...)`, or found in a log."""

from anybatch.core.spikes import Spike, SpikeDetector, SpikeRule
from anybatch.diagnostics.spike_log import SpikeReport, read_spikes
from anybatch.engine.spike_watch import SpikeWatch

__all__ = ["Spike", "SpikeDetector", "SpikeReport", "SpikeRule", "SpikeWatch", "read_spikes"]
