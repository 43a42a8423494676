"""When reductions end that begin while a backward still runs: buckets and blocks, one event after the other.

A formula would need to know what limits a step, computing or the network, and that changes from bucket to bucket. So
events are gone through in the order in which they happen.
"""

from collections.abc import Sequence


def reductions_end(
    ready: Sequence[float], alone: Sequence[float], on_the_wire: Sequence[float], *, at_once: int = 1
) -> float:
    """Return when the last reduction has ended.

    A reduction begins when its bucket is ready and fewer than `at_once` others are under way. Latency passes for
    several at once; the wire carries the bytes of one after the other, so none ends before its bytes are through.

    Args:
        ready: when each bucket is complete, in the order in which they are reduced, in seconds.
        alone: seconds of each reduction by itself.
        on_the_wire: of these, how long its bytes keep the link busy.
        at_once: reductions under way: 1 in a stream of NCCL's, 2 with gloo's two threads.
    """
    free = [0.0] * at_once
    wire_free = end = 0.0
    for when, seconds, wire in zip(ready, alone, on_the_wire, strict=True):
        thread = min(range(at_once), key=free.__getitem__)
        begin = max(when, free[thread])
        wire_free = max(wire_free, begin) + wire
        free[thread] = max(begin + seconds, wire_free)
        end = max(end, free[thread])
    return end


def bucket_times(buckets: Sequence[int], begin: float, backward_seconds: float) -> list[float]:
    """Return when each bucket is complete, if a backward makes gradient bytes at an even rate.

    Args:
        buckets: bytes, in backward order.
        begin: of the last backward, in seconds.
        backward_seconds: that it takes.
    """
    total, done, times = sum(buckets), 0, []
    for num_bytes in buckets:
        done += num_bytes
        times.append(begin + backward_seconds * done / total)
    return times


def sharded_micro_batch(
    forward: float, backward: float, gathers: Sequence[float], scatters: Sequence[float]
) -> tuple[float, float]:
    """Return when the computing of a micro-batch under FSDP2 has ended, and when its last reduce-scatter has.

    Block by block, weights are gathered before the forward and again before the backward, that of the next block while
    one computes; gradients are scattered after each block's backward. Blocks compute equally long. One collective goes
    over the link at a time, in the order in which they were asked for.

    Args:
        forward: seconds of all blocks.
        backward: seconds of all blocks.
        gathers: seconds to gather each block's weights, in forward order.
        scatters: seconds to reduce-scatter each block's gradients, in backward order; empty where none are.
    """
    num_blocks = len(gathers)
    link = 0.0
    computed = 0.0
    for seconds, order, sends in ((forward, gathers, ()), (backward, gathers[::-1], scatters)):
        # The first block of a pass is gathered when the pass begins, all others while the one before them computes.
        link = max(link, computed) + order[0]
        here = link
        for block in range(num_blocks):
            begin = max(computed, here)
            if block + 1 < num_blocks:
                link = max(link, begin) + order[block + 1]
                here = link
            computed = begin + seconds / num_blocks
            if sends:
                link = max(link, computed) + sends[block]
    return computed, max(link, computed)
