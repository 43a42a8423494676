"""The gradient noise scale, measured with `Engine(noise=GradientNoise(...))`, and the batch size that it suggests."""

from anybatch.core.gradient_noise import BatchCost, GradientNoise, NoiseEstimate
from anybatch.core.learning_rate import adam_gain, noise_gain

__all__ = ["BatchCost", "GradientNoise", "NoiseEstimate", "adam_gain", "noise_gain"]
