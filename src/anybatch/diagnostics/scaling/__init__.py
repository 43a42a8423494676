"""Why is it not linear? The seconds of a step on 1 to N ranks by part, the bottleneck, the bucket size, a change tried."""
