"""Micro-batches are copied to a GPU in one stream that all steps share."""

from contextlib import nullcontext

import pytest
import torch

from anybatch.engine.micro_batches import to_device


def test_all_steps_copy_in_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps share one stream, because torch's allocator reserves memory for every stream in use."""
    streams: list[object] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            del device
            streams.append(self)

        def wait_stream(self, other: object) -> None:
            assert other in streams

    device = torch.device("cuda", 63)  # a device that no machine has, because the stream is cached for the process
    computing = Stream(device)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: computing)

    for _ in range(2):
        assert list(to_device(iter([{"number": 1}, {"number": 2}]), device)) == [{"number": 1}, {"number": 2}]

    assert len(streams) == 2


@pytest.mark.gpu
def test_steps_reserve_no_more_memory_than_the_first() -> None:
    """Copying 40 batches of 8 MiB one by one reserves memory for at most two."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(40):
        for batch in to_device(iter([{"x": torch.ones(2**21)}]), device):
            batch["x"].sum().item()
        del batch

    assert torch.cuda.memory_reserved() - before <= 2 * 20 * 2**20
