"""All limits of the guide, in one frozen value."""

from dataclasses import dataclass

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a request, a stream and a run.

    Attributes:
        body_bytes: maximum bytes of a request's body, counted on arrival.
        body_seconds: maximum time for the body to arrive.
        head_seconds: maximum time for the headers of a request to arrive, on a new or a kept-alive connection.
        unread_seconds: maximum time that a response stays unread before the connection is closed.
        num_connections: maximum connections; more are answered with 503. At most half may wait for a request.
        num_streams: maximum event streams; more are answered with 503.
        messages_per_second: maximum messages with lines per stream; lines in between are sent together.
        message_bytes: approximate maximum size of such a message.
        heartbeat_seconds: silence after which a stream gets a comment.
        behind_lines: a reader with a larger backlog gets no progress lines.
        ring_lines: lines kept of a run.
        ring_bytes: maximum bytes of these lines.
        line_bytes: maximum size of a line of a run; larger ones are dropped and counted.
        answer_bytes: maximum size of a message from the worker, such as a recording.
        starts_per_second: maximum number of started runs.
        answer_seconds: maximum time for the worker to accept a run, including its start-up.
        wall_seconds: maximum time of a run, without pauses.
        paused_seconds: maximum time of a pause.
        alone_seconds: maximum time of a run without a watching page.
        resident_bytes: maximum memory of the worker process.
        terminate_seconds: time from the cancel request to SIGTERM.
        kill_seconds: time from the cancel request to SIGKILL.
        look_seconds: interval of checks of a run's time and memory.
        retry_seconds: maximum wait before a failed worker is restarted.
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
