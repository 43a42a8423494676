"""From a summed gradient to new parameters: precision, bf16, clipping, the optimizer's state, averaged weights."""
