"""The gradient noise scale, measured with `Engine(noise=GradientNoise(...))`, and the best batch size for it."""

from anybatch.core.gradient_noise import BatchCost, NoiseEstimate
from anybatch.core.learning_rate import noise_gain
from anybatch.engine.gradient_noise import GradientNoise

__all__ = ["BatchCost", "GradientNoise", "NoiseEstimate", "noise_gain"]
