"""Why is it not linear? The parts of a step on 1 to N ranks, the bottleneck, the bucket size, a change tried."""
