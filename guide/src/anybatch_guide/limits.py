"""How much the guide lets anybody ask of it: all limits, in one frozen value."""

from dataclasses import dataclass

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a request, a stream and a run.

    Attributes:
        body_bytes: most bytes of a request's body, counted as they arrive.
        body_seconds: in which it has to arrive.
        head_seconds: for the headers of a request to arrive, on a new connection or on one that is kept alive.
        unread_seconds: for which nobody reads a response; then the connection is closed.
        num_connections: connections at once; more are answered with 503. At most half of them may wait for a request.
        num_streams: streams of events at once; more are answered with 503.
        messages_per_second: most messages with lines that one stream gets; lines in between wait and go together.
        message_bytes: about how large such a message gets.
        heartbeat_seconds: after which a silent stream gets a comment.
        behind_lines: a reader that is further behind gets no lines that only show progress.
        ring_lines: lines kept of a run.
        ring_bytes: bytes of these lines.
        line_bytes: largest line of a run; larger ones are left out, and counted.
        answer_bytes: largest message of the worker: a recording.
        starts_per_second: runs begun.
        answer_seconds: in which the worker has to take a run, its own start included.
        wall_seconds: most time a run takes, pauses left out.
        paused_seconds: most time it may be paused.
        alone_seconds: after which a run ends that no page watches.
        resident_bytes: most memory of the worker's process.
        terminate_seconds: after being asked to cancel, until SIGTERM.
        kill_seconds: after being asked to cancel, until SIGKILL.
        look_seconds: between looks at a run's time and memory.
        retry_seconds: longest wait until a worker that does not start is started again.
    """

    body_bytes: int = 4 * _KIB
    body_seconds: float = 5.0
    head_seconds: float = 5.0
    unread_seconds: float = 30.0
    num_connections: int = 256
    num_streams: int = 8
    messages_per_second: float = 30.0
    message_bytes: int = 256 * _KIB
    heartbeat_seconds: float = 15.0
    behind_lines: int = 20_000
    ring_lines: int = 200_000
    ring_bytes: int = 32 * _MIB
    line_bytes: int = 64 * _KIB
    answer_bytes: int = 4 * _MIB
    starts_per_second: int = 2
    answer_seconds: float = 60.0
    wall_seconds: float = 120.0
    paused_seconds: float = 600.0
    alone_seconds: float = 60.0
    resident_bytes: int = 2 * _GIB
    terminate_seconds: float = 2.0
    kill_seconds: float = 5.0
    look_seconds: float = 0.25
    retry_seconds: float = 30.0
