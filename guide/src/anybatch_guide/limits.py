"""All limits of the guide, in one frozen value."""

from dataclasses import dataclass

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a request, a stream and a run."""

    body_bytes: int = 4 * _KIB  # maximum bytes of a request's body, counted on arrival
    body_seconds: float = 5.0  # maximum time for the body to arrive
    # maximum time for the headers of a request to arrive, on a new or a kept-alive connection
    head_seconds: float = 5.0
    unread_seconds: float = 30.0  # maximum time that a response stays unread before the connection is closed
    num_connections: int = 256  # maximum connections; more are answered with 503. At most half may wait for a request
    num_streams: int = 8  # maximum event streams; more are answered with 503
    # maximum messages per second in each stream; lines that arrive between two messages are sent together
    messages_per_second: float = 30.0
    message_bytes: int = 256 * _KIB  # approximate maximum size of a message in a stream
    heartbeat_seconds: float = 15.0  # silence after which a stream gets a comment
    max_backlog_lines: int = 20_000  # a page with a larger backlog gets no progress lines
    ring_lines: int = 200_000  # maximum lines of a run in memory
    ring_bytes: int = 32 * _MIB  # maximum bytes of a run's lines in memory
    line_bytes: int = 64 * _KIB  # maximum size of a line of a run; larger lines are dropped and counted
    answer_bytes: int = 4 * _MIB  # maximum size of a message from the worker, such as a recording
    starts_per_second: int = 2  # maximum number of runs that start per second
    answer_seconds: float = 60.0  # maximum time for the worker to accept a run, including its start-up
    wall_seconds: float = 120.0  # maximum time of a run, without pauses
    paused_seconds: float = 600.0  # maximum time of a pause
    unwatched_seconds: float = 60.0  # maximum time of a run without a watching page
    resident_bytes: int = 2 * _GIB  # maximum memory of the worker process
    terminate_seconds: float = 2.0  # time from the cancel request to SIGTERM
    kill_seconds: float = 5.0  # time from the cancel request to SIGKILL
    check_seconds: float = 0.25  # interval of checks of a run's time and memory
    retry_seconds: float = 30.0  # maximum wait before a failed worker is restarted
