"""From a summed gradient to new parameters: precision, clipping, the optimizer's state, averaged weights."""
