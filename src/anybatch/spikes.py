"""Spikes of the loss and of the gradient norm: detected during a run (`Engine(spikes=...)`), or found in a log."""

from anybatch.core.spikes import Spike, SpikeDetector, SpikeRule, SpikeWatch
from anybatch.diagnostics.spike_log import SpikeReport, read_spikes

__all__ = ["Spike", "SpikeDetector", "SpikeReport", "SpikeRule", "SpikeWatch", "read_spikes"]
