"""From a summed gradient to new parameters: precision, bf16 weights, clipping, the optimizer's state, averaged weights."""
