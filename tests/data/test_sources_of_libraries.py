"""Data sets, streams, loaders and samplers of libraries: each row of docs/data.md."""

import io
import json
import random
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

import anybatch as ab
from anybatch.core.batch import Placement
from anybatch.core.splitting import SplitOptions
from tests.architecture.source_tree import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(  # of the libraries
        "ignore:'set_vital' is deprecated",
        "ignore:This DataLoader will create",
        "ignore::DeprecationWarning",
        "ignore::pytest.PytestUnraisableExceptionWarning",  # WebDataset leaves archives open
    ),
]
NUM_SAMPLES, SIZE = 11, 4
OWN, SHUFFLED, ROUNDS = "own", "new in each epoch", "round robin"


def hugging_face(_: Path) -> Any:
    """Return a data set with an index."""
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    return datasets.Dataset.from_dict({"x": list(range(NUM_SAMPLES))}).with_format("torch")


def streaming(folder: Path) -> Any:
    """Return a stream of three shards."""
    return hugging_face(folder).to_iterable_dataset(num_shards=3)


def shards(folder: Path) -> Any:
    """Return the shards of a stream."""
    stream = streaming(folder)
    return ab.Shards([stream.shard(num_shards=3, index=number) for number in range(3)])


def web(folder: Path, **options: Any) -> Any:
    """Return a stream of three archives."""
    webdataset = pytest.importorskip("webdataset", reason="needs the package webdataset")
    for number in range(3):
        with tarfile.open(folder / f"{number}.tar", "w") as archive:
            for x in range(NUM_SAMPLES)[number * SIZE :][:SIZE]:
                content = json.dumps({"x": x}).encode()
                entry = tarfile.TarInfo(f"{x:04}.json")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return webdataset.WebDataset(f"{folder}/{{0..2}}.tar", nodesplitter=None, **options)


def web_in_order(folder: Path) -> Any:
    """Return a stream in the order of its archives."""
    return web(folder, shardshuffle=False).decode().to_tuple("json").map(lambda row: row[0])


def web_shuffled(folder: Path) -> Any:
    """Return a stream with shuffled archives and samples."""
    stream = web(folder, shardshuffle=100, seed=0).shuffle(1000, rng=random)
    return stream.decode().to_tuple("json").map(lambda row: row[0])


def stateful_loader(_: Path) -> Any:
    """Return a loader of samples."""
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="needs the package torchdata")
    return module.StatefulDataLoader([{"x": number} for number in range(NUM_SAMPLES)], batch_size=None)


SOURCES: dict[str, tuple[Callable[[Path], Any], str, dict[str, Any]]] = {
    "Hugging Face `Dataset`": (hugging_face, SHUFFLED, {"num_workers": 2}),
    "Hugging Face streaming": (streaming, OWN, {"num_workers": 1}),
    "Hugging Face streaming, shuffled": (
        lambda folder: streaming(folder).shuffle(seed=0, buffer_size=100),
        SHUFFLED,
        {},
    ),
    "Hugging Face shards": (shards, ROUNDS, {"num_workers": 3}),
    "WebDataset": (web_in_order, OWN, {}),
    "WebDataset, shuffled": (web_shuffled, SHUFFLED, {}),
    "torchdata `StatefulDataLoader`": (stateful_loader, OWN, {}),
}
SAMPLERS: dict[str, Callable[[], Any]] = {
    "`WeightedRandomSampler`": lambda: WeightedRandomSampler([1.0] * NUM_SAMPLES, NUM_SAMPLES, replacement=False),
    "`SubsetRandomSampler`": lambda: SubsetRandomSampler(range(NUM_SAMPLES)),
    "`RandomSampler`": lambda: RandomSampler(range(NUM_SAMPLES)),
}


def numbers(samples: list[Any]) -> list[int]:
    """Return the numbers of the samples of a micro-batch."""
    return [int(sample["x"]) for sample in samples]


def steps(dataset: Any, **options: Any) -> list[tuple[Any, list[int]]]:
    """Return the next position and the samples of each step of two epochs, as two ranks read them."""
    batches = ab.batches(dataset, effective_batch_size=SIZE, epochs=2, collate=numbers, **options)
    placements = [Placement(SplitOptions(micro_batch_size=1), 2, rank) for rank in range(2)]
    return [
        (batch.end, [x for placement in placements for unit in placement.micro_batches(batch) for x in unit])
        for batch in batches
    ]


def check(make: Callable[[], Any], order: str, **options: Any) -> None:
    """Assert that a source yields every sample once per epoch, in this order, and the same after every resume."""
    whole = steps(make(), **options)
    read = [x for _, samples in whole for x in samples]
    epochs = read[:NUM_SAMPLES], read[NUM_SAMPLES:]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(NUM_SAMPLES))
    if order == SHUFFLED:
        assert epochs[0] != epochs[1]
    else:
        assert list(epochs) == [[0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7] if order == ROUNDS else list(range(NUM_SAMPLES))] * 2
    for number, (end, _) in enumerate(whole, 1):
        assert steps(make(), start=end, **options) == whole[number:]


@pytest.mark.parametrize("name", SOURCES)
def test_source(name: str, tmp_path: Path) -> None:
    """A source behaves as its row of the page states, with its number of workers too."""
    make, order, workers = SOURCES[name]
    check(lambda: make(tmp_path), order)
    if workers:
        assert steps(make(tmp_path), **workers) == steps(make(tmp_path))


@pytest.mark.parametrize("name", SAMPLERS)
def test_sampler(name: str) -> None:
    """A sampler's order is new in each epoch, and the same on every rank and after a resume."""
    dataset = [{"x": number} for number in range(NUM_SAMPLES)]
    check(lambda: dataset, SHUFFLED, sampler=SAMPLERS[name]())


def test_sources_that_lose_samples(tmp_path: Path) -> None:
    """A part for one rank lacks the others' samples, and WebDataset's own random numbers give each reader an order."""
    stream = streaming(tmp_path)
    distributed = pytest.importorskip("datasets.distributed", reason="needs the package datasets")
    part = distributed.split_dataset_by_node(stream, rank=0, world_size=2)
    orders = [
        steps(web(tmp_path, shardshuffle=False).shuffle(1000).decode().to_tuple("json").map(lambda row: row[0]))
        for _ in range(2)
    ]

    assert sum(len(samples) for _, samples in steps(part)) < 2 * NUM_SAMPLES
    assert orders[0] != orders[1]


def test_the_page_lists_every_source() -> None:
    """The first table of docs/data.md has a row for each tested source, and one for the samplers."""
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8").partition("Some ways")[0]
    rows = re.findall(r"^\| (\S.*?) \|", page, flags=re.MULTILINE)

    assert rows == ["data", *SOURCES, ", ".join(SAMPLERS)]
