"""A checkpoint saved in parts by several processes is complete, safe, and readable by other software."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from anybatch.checkpoints import list_checkpoints, load, load_latest, save
from anybatch.checkpoints.loading import stored_state
from anybatch.checkpoints.saving import LocalPart, SharedSave, assign_parts
from anybatch.checkpoints.structure import TensorPart
from anybatch.errors import CheckpointError, DamagedCheckpointError, TruncatedCheckpointError
from tests.checkpoints.exactly import exactly
from tests.checkpoints.faulty_disk import Crash, FaultyDisk
from tests.faults import sees

NUM_PROCESSES = 3


def whole_state(number: int = 0) -> dict[str, Any]:
    """Return a state with tensors to shard by row and column, tied weights, numbers, and an unusual dtype."""
    generator = torch.Generator().manual_seed(number)
    rows, columns = torch.randn(7, 4, generator=generator), torch.randn(2, 5, 2, generator=generator)
    weights = {"rows": rows, "tied": rows, "columns": columns}
    return {
        "num_steps": number,
        "model": {**weights, "scale": torch.tensor(0.5), "none": torch.zeros(0, 3)},
        "wide": torch.randn(5, 3, generator=generator, dtype=torch.float64).to(torch.complex128),
        "text": ("a", 1, None),
    }


def held_by(state: dict[str, Any], process: int) -> dict[str, Any]:
    """Return the state of a process: its row and column shards, the rest in full, and the scale on process 0."""

    def part(tensor: torch.Tensor, dim: int) -> TensorPart:
        pieces = tensor.chunk(NUM_PROCESSES, dim)  # the last is smaller or missing
        begin = sum(piece.shape[dim] for piece in pieces[:process])
        own = pieces[process] if process < len(pieces) else tensor.narrow(dim, 0, 0)
        return TensorPart(own, tuple(tensor.shape), tuple(begin if at == dim else 0 for at in range(tensor.dim())))

    model = state["model"]
    scale = model["scale"] if process == 0 else torch.empty((), device="meta")
    rows = part(model["rows"], 0)
    cut = {**model, "rows": rows, "tied": rows, "columns": part(model["columns"], 1), "scale": scale}
    return {**state, "model": cut, "wide": part(state["wide"], 0)}


def begun(folder: Path, state: dict[str, Any], *, disk: FaultyDisk) -> list[SharedSave]:
    """Begin to save in parts, and return the shares of all processes."""
    shares = [
        SharedSave(folder, state["num_steps"], held_by(state, n), process=n, num_processes=NUM_PROCESSES, disk=disk)
        for n in range(NUM_PROCESSES)
    ]
    shares[0].begin()
    for share in shares:
        share.assign([each.local_parts for each in shares])
    return shares


def save_together(folder: Path, state: dict[str, Any], *, disk: FaultyDisk) -> Path:
    """Save in parts, process by process, and return the path."""
    shares = begun(folder, state, disk=disk)
    return shares[0].finish([share.write() for share in shares]).path


@sees(
    "columns of a part are read from its first column",
    "src/anybatch/checkpoints/tensors.py",
    "columns = _slices(starts[1:], stops[1:], start[1:])",
    "columns = _slices(starts[1:], stops[1:], starts[1:])",
)
def test_parts_load_as_one_state(tmp_path: Path) -> None:
    """A state saved in parts by three processes loads bitwise the same as one saved by a single process.

    Any box of a tensor can be read too.
    """
    state = whole_state()
    path = save_together(tmp_path / "parts", state, disk=FaultyDisk())
    together, alone = load(path), load(save(tmp_path / "whole", 0, state).path)

    assert exactly(together) == exactly(alone)
    assert together["model"]["rows"] is together["model"]["tied"]
    with stored_state(path) as stored:
        for start in range(5):
            box = stored["model"]["columns"].read((1, start, 0), (1, 5 - start, 1))
            assert torch.equal(box, state["model"]["columns"][1:, start:, :1])
            assert torch.equal(stored["wide"].read((start, 1), (1, 2)), state["wide"][start : start + 1, 1:])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_parts(tmp_path: Path) -> None:
    """`torch.distributed.checkpoint` can read the tensors of a checkpoint in parts."""
    state = whole_state()
    path = save_together(tmp_path, state, disk=FaultyDisk())
    found = {f"model.{name}": torch.zeros_like(state["model"][name]) for name in ("rows", "columns", "scale")}
    dcp_load(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)

    assert all(torch.equal(tensor, state["model"][name.removeprefix("model.")]) for name, tensor in found.items())


@sees(
    "a checkpoint in parts gets its name before its digests are written",
    "src/anybatch/checkpoints/saving.py",
    "            write_file(self._partial / DIGESTS, [digests_file], disk=self._disk)\n",
    "            put_in_place(self._partial, self._target, disk=self._disk)\n"
    "            write_file(self._target / DIGESTS, [digests_file], disk=self._disk)\n"
    "            self._disk.rename(self._target, self._partial)\n",
)
@pytest.mark.slow
def test_an_interruption_keeps_a_complete_checkpoint(tmp_path: Path) -> None:
    """Interrupted at any operation of any process, or by power loss, the old or the new checkpoint is loaded."""
    counting = FaultyDisk()
    save_together(tmp_path / "counted", whole_state(1), disk=FaultyDisk())
    save_together(tmp_path / "counted", whole_state(2), disk=counting)
    for number in range(len(counting.operations)):
        folder = tmp_path / str(number)
        save_together(folder, whole_state(1), disk=FaultyDisk())
        disk = FaultyDisk(number)
        with pytest.raises(Crash):
            save_together(folder, whole_state(2), disk=disk)
        disk.lose_power(disk.num_unsynced_renames)
        loaded = load_latest(folder)
        assert not loaded.skipped
        assert exactly(loaded.state) == exactly(whole_state(loaded.state["num_steps"]))
        save_together(folder, whole_state(3), disk=FaultyDisk())
        assert [path.name[-1] for path in list_checkpoints(folder)][-1] == "3"


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda file: file.unlink(), DamagedCheckpointError),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), TruncatedCheckpointError),
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"!"), DamagedCheckpointError),
    ],
)
def test_a_damaged_part_is_damage(damage: Callable[[Path], Any], error: type[CheckpointError], tmp_path: Path) -> None:
    """If one process's file is missing, truncated or changed, the checkpoint is skipped."""
    path = save_together(tmp_path, whole_state(1), disk=FaultyDisk())
    damage(path / "tensors-00002-of-00003.safetensors")

    with pytest.raises(error):
        load(path)


def _row(begin: int, stop: int) -> LocalPart:
    return LocalPart("a", (begin,), (stop - begin,), (4,), 4 * (stop - begin))


@pytest.mark.parametrize("held", [((0, 2), (3, 4)), ((0, 4), (0, 2)), ((0, 3), (0, 1)), ((0, 3), (2, 4))])
def test_incomplete_parts_are_refused(held: Sequence[tuple[int, int]]) -> None:
    """Gaps and overlaps raise before anything is written, with the tensor's name and the fix."""
    with pytest.raises(CheckpointError):
        assign_parts([[_row(*rows)] for rows in held])
