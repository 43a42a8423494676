"""Plans of randomly drawn models from five libraries, against the memory that torch's CPU allocator allocates.

Drawn are classifiers of torchvision and timm, model types of transformers (made small), networks of diffusers (made
small), and models of transformers with adapters of peft; each with an optimizer and a precision. "own" are the models
of `unseen_models.py` and `unseen_sequences.py`, "inputs" models of transformers that take more than tokens or images.
Each is planned by `ab.plan` from Python, as a user would, and then run: two steps of two micro-batches, of which the
second is measured, every allocation of torch's CPU allocator counted, with and without the workspaces of convolutions.
Planned are tensors, as for CUDA, and allocated bytes, which include workspaces that the planner measures on a CPU.
Models that do not build or run are left out, and counted.

    python benchmarks/plan_unseen.py [--seed 18] [--seconds 3600] [--library NAME] [--out benchmarks/results/NAME.md]

It needs torchvision, timm, transformers, diffusers and peft, or the libraries named by --library; a torchvision for
another build of torch will do, since its own operations are not used.
"""

import dataclasses
import gc
import itertools
import logging
import random
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import report
import torch
import torch.nn.functional as F
import unseen_sequences
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from unseen_models import ENTRIES

import anybatch as ab
from anybatch.core.tree import join_samples
from anybatch.errors import UserError
from anybatch.planner.plan import Plan

MEBIBYTE = 2**20
MICRO_BATCH, OWN_MICRO_BATCH, NUM_MICRO_BATCHES = 4, 16, 2
MOST_PARAMETERS = 60_000_000
LEARNING_RATE = 1e-4
Batch = dict[str, Any]
SECOND_STEP = "the second step"
WORKSPACES = ("aten::convolution", "aten::_convolution", "aten::mkldnn_convolution", "aten::_slow_conv")
"""Operations whose workspaces are not counted as tensors."""
NUM_DRAWN = {"own": 500, "inputs": 500, "torchvision": 14, "timm": 20, "transformers": 26, "diffusers": 6, "peft": 8}
"""Number of models drawn per library; all of the first two."""
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda named: torch.optim.AdamW([p for _, p in named], lr=LEARNING_RATE),
    "SGD": lambda named: torch.optim.SGD([p for _, p in named], lr=LEARNING_RATE, momentum=0.9),
    "Adafactor": lambda named: torch.optim.Adafactor([p for _, p in named], lr=LEARNING_RATE),
}
_SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "emb_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "n_inner"), 256),
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "num_experts"), 4),
    "vocab_size": 1000,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "d_kv": 32,
    "moe_intermediate_size": 64,
    "num_decoder_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
"""Values that make a transformers configuration small, for attributes that it has."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One configuration."""

    name: str
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    batch: Callable[[int], Batch]
    optimizer: str
    precision: str
    size: int = MICRO_BATCH  # samples of a micro-batch


def of_classes(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy over images."""
    logits = model(batch["image"])
    return F.cross_entropy(logits if isinstance(logits, torch.Tensor) else logits[0], batch["label"])


def own(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss that a transformers model computes itself."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def of_noise(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean squared error of a diffusers network."""
    inputs = {name: value for name, value in batch.items() if name != "target"}
    return F.mse_loss(model(**inputs, return_dict=False)[0].float(), batch["target"])


def images(channels: int, height: int, width: int) -> Callable[[int], Batch]:
    """Return a function (samples) -> images and classes."""
    return lambda number: {
        "image": torch.randn(number, channels, height, width),
        "label": torch.randint(10, (number,)),
    }


def of_torchvision(draw: random.Random) -> Iterator[tuple[Any, ...]]:
    """Yield classifiers."""
    import torchvision  # noqa: PLC0415

    names = torchvision.models.list_models(module=torchvision.models)
    for name in draw.sample(names, len(names)):
        side = 299 if name == "inception_v3" else draw.choice((64, 128, 224))
        side = 224 if name.startswith(("vit", "maxvit")) else side
        yield name, lambda name=name: torchvision.models.get_model(name), of_classes, images(3, side, side)


def of_timm(draw: random.Random) -> Iterator[tuple[Any, ...]]:
    """Yield classifiers at their published size."""
    import timm  # noqa: PLC0415

    names = timm.list_models()
    for name in draw.sample(names, len(names)):
        settings = timm.get_pretrained_cfg(name)
        if settings is not None and settings.input_size[1] <= 256:
            yield name, lambda name=name: timm.create_model(name), of_classes, images(*settings.input_size)


def small_config(kind: str) -> Any:  # noqa: ANN401 (of transformers)
    """Return a small configuration of a model type, with its most common training class."""
    import transformers  # noqa: PLC0415

    from anybatch.recipes.planning.subjects import _class_of  # noqa: PLC0415 (as `anybatch plan` does it)

    config = transformers.AutoConfig.for_model(kind)
    known = config.to_dict()
    config = transformers.AutoConfig.for_model(kind, **{name: value for name, value in _SMALL.items() if name in known})
    return config, _class_of(config, None)


def of_transformers(draw: random.Random) -> Iterator[tuple[Any, ...]]:
    """Yield small models of any type that predicts tokens or image classes."""
    import transformers  # noqa: PLC0415

    auto = transformers.models.auto.modeling_auto
    tables = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    images_of = auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    kinds = sorted({*tables[0], *tables[1], *auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, *images_of})
    for kind in draw.sample(kinds, len(kinds)):
        try:
            config, klass = small_config(kind)
        except Exception:  # noqa: BLE001, S112 (no such small configuration: not a matter of planning)
            continue
        if klass.main_input_name == "input_ids":
            batch = _tokens(64)
        elif klass.main_input_name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
            side, channels = config.image_size, config.num_channels
            batch = _pixels(channels, side)
        else:
            continue
        yield f"{kind} ({klass.__name__})", lambda klass=klass, config=config: klass(config), own, batch


def _tokens(length: int) -> Callable[[int], Batch]:
    def make(number: int) -> Batch:
        tokens = torch.randint(3, 1000, (number, length))
        return {"input_ids": tokens, "labels": tokens.clone()}

    return make


def _pixels(channels: int, side: int) -> Callable[[int], Batch]:
    return lambda number: {
        "pixel_values": torch.randn(number, channels, side, side),
        "labels": torch.randint(2, (number,)),
    }


def of_diffusers(draw: random.Random) -> Iterator[tuple[Any, ...]]:
    """Yield UNets of random width and depth, with and without text."""
    import diffusers  # noqa: PLC0415

    while True:
        width, depth, side = draw.choice((32, 64)), draw.choice((2, 3)), draw.choice((16, 32))
        channels = tuple(width * 2**level for level in range(depth))
        with_text = draw.random() < 0.7
        common = {"sample_size": side, "block_out_channels": channels, "layers_per_block": draw.choice((1, 2))}
        if with_text:
            heads = draw.choice((4, 8))
            ways = (
                ("CrossAttnDownBlock2D",) * (depth - 1) + ("DownBlock2D",),
                ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * (depth - 1),
            )
            options = {
                **common,
                "in_channels": 4,
                "out_channels": 4,
                "cross_attention_dim": 64,
                "attention_head_dim": heads,
                "down_block_types": ways[0],
                "up_block_types": ways[1],
            }
            name = f"UNet2DConditionModel {channels}, {side} x {side}"
            yield (
                name,
                lambda options=options: diffusers.UNet2DConditionModel(**options),
                of_noise,
                _latents(4, side, 64),
            )
        else:
            options = {
                **common,
                "in_channels": 3,
                "out_channels": 3,
                "down_block_types": ("DownBlock2D",) * (depth - 1) + ("AttnDownBlock2D",),
                "up_block_types": ("AttnUpBlock2D",) + ("UpBlock2D",) * (depth - 1),
            }
            name = f"UNet2DModel {channels}, {side} x {side}"
            yield name, lambda options=options: diffusers.UNet2DModel(**options), of_noise, _latents(3, side, None)


def _latents(channels: int, side: int, text: int | None) -> Callable[[int], Batch]:
    def make(number: int) -> Batch:
        noise = torch.randn(number, channels, side, side)
        batch: Batch = {"sample": noise, "target": noise.clone(), "timestep": torch.randint(1000, (number,))}
        return batch if text is None else {**batch, "encoder_hidden_states": torch.randn(number, 20, text)}

    return make


def of_peft(draw: random.Random) -> Iterator[tuple[Any, ...]]:
    """Yield transformers models with adapters."""
    import peft  # noqa: PLC0415

    kinds = ("llama", "mistral", "qwen2", "gemma", "opt", "gpt_neox", "bert", "roberta", "t5", "phi")
    ways: dict[str, Callable[[], Any]] = {
        "LoRA": lambda: peft.LoraConfig(r=8, target_modules="all-linear"),
        "LoRA, dropout": lambda: peft.LoraConfig(r=16, lora_dropout=0.1, target_modules="all-linear"),
        "DoRA": lambda: peft.LoraConfig(r=8, use_dora=True, target_modules="all-linear"),
        "LoHa": lambda: peft.LoHaConfig(r=4, target_modules="all-linear"),
        "OFT": lambda: peft.OFTConfig(oft_block_size=8, target_modules="all-linear"),
    }
    while True:
        kind, way = draw.choice(kinds), draw.choice(sorted(ways))
        config, klass = small_config(kind)

        def make(klass: Any = klass, config: Any = config, way: str = way) -> nn.Module:  # noqa: ANN401
            model: nn.Module = peft.get_peft_model(klass(config), ways[way]())
            return model

        yield f"{way} on {kind}", make, own, _tokens(64)


def of_own(draw: random.Random) -> Iterator[tuple[Any, ...]]:
    """Yield the models written for this benchmark."""
    del draw
    for family, name, make, loss, batch in ENTRIES:
        yield f"{family}: {name}", make, loss, batch


def of_inputs(draw: random.Random) -> Iterator[tuple[Any, ...]]:
    """Yield small models of transformers that take sound, video, boxes or several inputs."""
    del draw
    import transformers  # noqa: PLC0415

    for name, (config, batch) in unseen_sequences.inputs_of_transformers(transformers).items():
        kind = getattr(transformers, name)
        yield name, lambda kind=kind, config=config: kind(config), own, batch


def drawn(seed: int, only: str = "") -> Iterator[tuple[str, Drawn]]:
    """Yield a seed's configurations with few enough parameters, by library."""
    sources = {
        "own": of_own,
        "inputs": of_inputs,
        "torchvision": of_torchvision,
        "timm": of_timm,
        "transformers": of_transformers,
        "diffusers": of_diffusers,
        "peft": of_peft,
    }
    for library, source in sources.items():
        if only not in {"", library}:
            continue
        draw = random.Random(f"{seed} {library}")  # noqa: S311 (a choice, no secret)
        left = NUM_DRAWN[library]
        for name, make, loss, batch in source(draw):
            optimizer, precision = draw.choice(sorted(OPTIMIZERS)), draw.choice(("fp32", "fp32", "bf16"))
            if not left:
                break
            if not small_enough(make):
                continue
            left -= 1
            size = OWN_MICRO_BATCH if library == "own" else MICRO_BATCH
            yield library, Drawn(name, make, loss, batch, optimizer, precision, size)


def small_enough(make: Callable[[], nn.Module]) -> bool:
    """Return whether a model can be created without memory, and is small enough to run here."""
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in make().parameters()) <= MOST_PARAMETERS
    except Exception:  # noqa: BLE001 (it may still be created with memory)
        return True


def sample_of(one: Drawn) -> Batch:
    """Return the samples of a micro-batch, the same for plan and measurement: some sizes depend on data."""
    torch.manual_seed(1)
    return one.batch(one.size)


def planned(one: Drawn) -> Plan:
    """Return the plan of a configuration, made as a user would."""
    return ab.plan(
        one.make,
        OPTIMIZERS[one.optimizer],
        ab.mean_over_samples(one.loss),
        sample_of(one),
        device="cpu:64GiB",
        effective_batch_size=one.size * NUM_MICRO_BATCHES,
        micro_batch_size=one.size,
        precision=one.precision,  # type: ignore[arg-type]
        proposals=False,
    )


def engine_of(one: Drawn) -> ab.Engine:
    """Return the engine for a configuration."""
    torch.manual_seed(0)
    return ab.Engine(
        one.make(),
        OPTIMIZERS[one.optimizer],
        ab.mean_over_samples(one.loss),
        micro_batch_size=one.size,
        check_loss=False,
        norms="keep",
        precision=one.precision,  # type: ignore[arg-type]
        world=ab.World.from_environment(device="cpu"),
    )


def measured(one: Drawn) -> tuple[int, int]:
    """Return two peaks of the second step of the real engine: of all allocated bytes, and without workspaces."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        batch = join_samples([sample_of(one)] * NUM_MICRO_BATCHES)
        engine = engine_of(one)
        engine.step(batch)
        with record_function(SECOND_STEP):
            engine.step(batch)
        engine.close()
    results: Any = profiler.profiler
    events = sorted(
        with_kernels(results.kineto_results.experimental_event_tree()), key=lambda row: row[0].start_time_ns
    )
    span = next(event for event, _ in events if event.name == SECOND_STEP)
    rows = [(event, kernel) for event, kernel in events if event.name == "[memory]"]
    made: dict[int, tuple[int, int]] = {}
    freed_inside, changes = set(), []
    for number, (event, kernel) in enumerate(rows):
        pointer, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        first, taken = made.pop(pointer, (number, 0)) if size < 0 else (number, 0)
        if size > 0:
            made[pointer] = number, size
        elif kernel is not None and kernel == rows[first][1]:
            freed_inside |= {first, number}
        changes.append((number, event.start_time_ns, size if size > 0 else -taken))
    peaks = []
    for left_out in (set(), freed_inside):
        kept = [(moment, size) for number, moment, size in changes if number not in left_out]
        held = itertools.accumulate(size for _, size in kept)
        within = (span.start_time_ns <= moment <= span.end_time_ns for moment, _ in kept)
        peaks.append(max(total for total, inside in zip(held, within, strict=True) if inside))
    return peaks[0], peaks[1]


def with_kernels(events: list[Any], kernel: int | None = None) -> Iterator[tuple[Any, int | None]]:
    """Yield events and their descendants, each with the start of the kernel in `WORKSPACES` around it."""
    for event in events:
        inside = event.start_time_ns if kernel is None and event.name.startswith(WORKSPACES) else kernel
        yield event, inside
        yield from with_kernels(event.children, inside)


def stand_in_for_missing_operations() -> None:
    """Declare operations that torchvision needs on import if its own ones do not load."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    text: str
    outcome: str
    errors: tuple[float, ...] = ()  # in percent, against tensors and against allocated bytes
    seconds: float = 0.0


def row(library: str, one: Drawn) -> Row:
    """Return the row of a configuration."""
    start, what = time.process_time(), f"| {library} | {one.name} | {one.optimizer} | {one.precision} |"
    try:
        plan, refused = planned(one), ""
    except UserError as error:
        plan, refused = None, str(error)
    except Exception as error:  # noqa: BLE001 (the model cannot be created; else a fault of the planner)
        plan, refused = None, f"NOT AS AN ERROR OF OURS: {type(error).__name__}: {error}"
    took = time.process_time() - start
    try:
        allocated, live = measured(one)
    except Exception as error:  # noqa: BLE001 (any error of the model itself)
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:160].replace("|", "/")
        return Row(f"{what} - | - | - | - | - | - | {took:.1f} | does not run: {reason} |", "does not run")
    found = f"{live / MEBIBYTE:.2f} | {allocated / MEBIBYTE:.2f}"
    if plan is None:
        text = refused.replace("|", "/").replace("\n", " ")[:200]
        return Row(f"{what} - | - | {found} | - | - | {took:.1f} | {text} |", "refused")
    planned_bytes = plan.baseline.tensor_bytes, plan.baseline.peak.num_bytes
    errors = tuple(100 * (one / size - 1) for one, size in zip(planned_bytes, (live, allocated), strict=True))
    sizes = " | ".join(f"{one / MEBIBYTE:.2f}" for one in planned_bytes)
    figures = f"{sizes} | {found} | {errors[0]:+.2f} | {errors[1]:+.2f} | {took:.1f}"
    return Row(f"{what} {figures} | {'; '.join(plan.notes[:2])[:120]} |", "planned", errors, took)


def summary(rows: list[Row], counts: dict[str, int]) -> list[str]:
    """Return the summary of the table."""
    lines = [f"{', '.join(f'{number} {what}' for what, number in counts.items())}."]
    good = [one for one in rows if one.errors]
    for number, name in enumerate(("live tensors", "allocated bytes")):
        errors = [one.errors[number] for one in good]
        sizes = sorted(map(abs, errors))
        within = ", ".join(f"{sum(one <= limit for one in sizes)} within {limit}%" for limit in (0.1, 1.0, 3.0, 10.0))
        lines.append(
            f"Against {name}, of {len(sizes)} plans {within}; median {sizes[len(sizes) // 2]:.3f}%, largest "
            f"{sizes[-1]:.1f}%; too low by more than 1%: {sum(one < -1 for one in errors)}."
        )
    seconds = sorted(one.seconds for one in good)
    lines.append(f"CPU seconds of a plan: median {seconds[len(seconds) // 2]:.2f}, largest {seconds[-1]:.2f}.")
    return lines


def main() -> None:
    """Draw, plan, measure and print."""
    parser = report.parser(__doc__)
    parser.add_argument("--seed", type=int, default=18, help="of the draw (default: 18)")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no more after so long (default: 3600)")
    parser.add_argument("--library", default="", help="draw from this one only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    stand_in_for_missing_operations()
    head = (
        "| library | model | optimizer | precision | planned tensors, MiB | planned allocation, MiB | tensors, MiB "
        "| allocated, MiB | of tensors, % "
        "| of allocated, % | planned in CPU s | notes |"
    )
    rows: list[Row] = []
    counts, start = {}, time.perf_counter()
    for library, one in drawn(options.seed, options.library):
        if time.perf_counter() - start > options.seconds:
            counts["not reached in time"] = counts.get("not reached in time", 0) + 1
            continue
        rows.append(row(library, one))
        counts[rows[-1].outcome] = counts.get(rows[-1].outcome, 0) + 1
        print(rows[-1].text, flush=True)
    only = f" --library {options.library}" if options.library else ""
    # Lists of models grow: with another version of a library, the same seed draws other models.
    libraries = [name for name in NUM_DRAWN if name not in {"own", "inputs"} and options.library in {"", name}]
    versions = ", ".join(f"{library} {version(library)}" for library in libraries or ["transformers"])
    report.publish(
        [*summary(rows, counts), "", head, "|" + "---|" * 12, *(one.text for one in rows)],
        title="Plans of models that nobody chose, against memory as allocated",
        command=f"python benchmarks/plan_unseen.py --seed {options.seed}{only}",
        setting=f"{NUM_MICRO_BATCHES} micro-batches of {MICRO_BATCH} (own: {OWN_MICRO_BATCH}), 1 thread; {versions}",
        out=options.out,
    )


if __name__ == "__main__":
    main()
