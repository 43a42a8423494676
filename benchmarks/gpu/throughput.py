"""Stage 3: tokens per second of the engine, a plain loop and other trainers, interleaved; host synchronisations."""

import contextlib
import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from gpu.stage import Row, Rows, Setting
from torch import nn
from torch.nn import functional

import anybatch as ab

TITLE = "Throughput on one device"
Batch = dict[str, torch.Tensor]
Step = Callable[[Batch], object]
Times = Callable[[int], list[float]]
"""Runs this many steps after a warm-up step, and returns the seconds of each."""
LEARNING_RATE = 1e-4
NUM_FIRST_STEPS = 8
"""In which the engine still checks the loss, and torch compiles and loads kernels."""
CLIP = 1.0
PEAK_BF16_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
"""Dense bf16 peak by data sheet (NVIDIA); other cards get no share of peak."""
TOKENS = "Decoder, bf16 autocast, fused AdamW, clipped: steps interleaved (ratio: median over rounds)"
IMAGES = "ResNet-50 in channels-last, bf16 autocast, SGD with momentum"
SYNCS = "Host synchronisations in one steady step (torch.cuda.set_sync_debug_mode)"
MATMUL = "Rate of a matrix product"


def decoder(setting: Setting) -> nn.Module:
    """Return GPT-2 (124M parameters) with random weights, or a small one of its kind."""
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 (a stage runs without it, up to here)

    torch.manual_seed(0)
    sizes = setting.pick({}, {"n_layer": 2, "n_embd": 64, "n_head": 2}, {"n_layer": 1, "n_embd": 32, "n_head": 2})
    config = GPT2Config(
        vocab_size=setting.pick(50304, 512, 64),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        **sizes,
    )
    config._attn_implementation = "sdpa"  # noqa: SLF001 (how transformers names it for models built from a config)
    model: nn.Module = GPT2LMHeadModel(config)
    return model.to(setting.device).train()


def tokens(setting: Setting, num_samples: int, length: int) -> Batch:
    """Return token ids in host memory, pinned where there is a GPU."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, setting.pick(50304, 512, 64), (num_samples, length), generator=generator)
    ids = ids.pin_memory() if setting.on_gpu else ids
    return {"input_ids": ids, "labels": ids}


def language_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of the next token."""
    found: torch.Tensor = model(**batch).loss
    return found


def adamw(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all use."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=setting.on_gpu)


def pieces(batch: Batch, size: int, device: str) -> Iterator[Batch]:
    """Yield micro-batches on the device."""
    for start in range(0, len(next(iter(batch.values()))), size):
        yield {k: v[start : start + size].to(device, non_blocking=True) for k, v in batch.items()}


def autocast(setting: Setting) -> torch.autocast:
    """Return a context of bf16 autocast."""
    return torch.autocast(setting.device.split(":")[0], torch.bfloat16)


def plain(setting: Setting, model: nn.Module, micro_batch_size: int) -> Step:
    """Return the step of a plain loop."""
    optimizer = adamw(setting, model)

    def step(batch: Batch) -> None:
        num_pieces = len(batch["labels"]) // micro_batch_size
        for piece in pieces(batch, micro_batch_size, setting.device):
            with autocast(setting):
                value = language_loss(model, piece)
            (value / num_pieces).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def engine(setting: Setting, model: nn.Module, micro_batch_size: int) -> Step:
    """Return the engine's step."""
    made = ab.Engine(
        model,
        adamw(setting, model),
        ab.mean_over_tokens(language_loss),
        micro_batch_size=micro_batch_size,
        precision="bf16",
        clip=CLIP,
        world=ab.World.from_environment(device=setting.device),
    )
    return made.step


def accelerate(setting: Setting, model: nn.Module, micro_batch_size: int) -> Step:
    """Return a step of Accelerate, with its own accumulation."""
    from accelerate import Accelerator  # noqa: PLC0415
    from accelerate.state import AcceleratorState  # noqa: PLC0415

    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001 (one process, several settings)
    host = Accelerator(mixed_precision="bf16", cpu=not setting.on_gpu)
    model, optimizer = host.prepare(model, adamw(setting, model))

    def step(batch: Batch) -> None:
        num_pieces = len(batch["labels"]) // micro_batch_size
        host.gradient_accumulation_steps = num_pieces
        for piece in pieces(batch, micro_batch_size, setting.device):
            with host.accumulate(model):
                host.backward(language_loss(model, piece))
                if host.sync_gradients:
                    host.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()

    return step


def fabric(setting: Setting, model: nn.Module, micro_batch_size: int) -> Step:
    """Return a step of Lightning Fabric."""
    from lightning.fabric import Fabric  # noqa: PLC0415

    host = Fabric(accelerator="gpu" if setting.on_gpu else "cpu", devices=1, precision="bf16-mixed")
    model, optimizer = host.setup(model, adamw(setting, model))

    def step(batch: Batch) -> None:
        num_pieces = len(batch["labels"]) // micro_batch_size
        for number, piece in enumerate(pieces(batch, micro_batch_size, setting.device)):
            with host.no_backward_sync(model, enabled=number < num_pieces - 1):
                host.backward(language_loss(model, piece) / num_pieces)
        host.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def trainer(setting: Setting, model: nn.Module, micro_batch_size: int, batch: Batch) -> Times:
    """Return the times of steps of transformers' Trainer, which runs its own loop and loader."""
    import accelerate  # noqa: F401, PLC0415 (the Trainer needs it)
    import transformers  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    samples = [{name: value[i] for name, value in batch.items()} for i in range(len(batch["labels"]))]

    class Clock(transformers.TrainerCallback):
        """Notes when steps end."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: object, **__: object) -> None:
            setting.synchronize()
            self.ends.append(time.perf_counter())

    def times(num_steps: int) -> list[float]:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
            arguments = transformers.TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=micro_batch_size,
                gradient_accumulation_steps=len(samples) // micro_batch_size,
                max_steps=num_steps + 1,
                bf16=True,
                max_grad_norm=CLIP,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                optim="adamw_torch_fused" if setting.on_gpu else "adamw_torch",
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                use_cpu=not setting.on_gpu,
            )
            clock = Clock()
            transformers.Trainer(model, arguments, train_dataset=samples * 2, callbacks=[clock]).train()
        return [stop - start for start, stop in zip(clock.ends, clock.ends[1:], strict=False)]

    return times


def timed(setting: Setting, step: Step, batch: Batch) -> Times:
    """Return the times of a step."""

    def times(num_steps: int) -> list[float]:
        step(batch)  # one that is not timed, as in the Trainer's rounds
        found = []
        for _ in range(num_steps):
            setting.synchronize()
            begin = time.perf_counter()
            step(batch)
            setting.synchronize()
            found.append(time.perf_counter() - begin)
        return found

    return times


def rivals(setting: Setting, micro_batch_size: int, batch: Batch) -> tuple[dict[str, Times], list[str]]:
    """Return all trainers, each with its own model, and the missing ones."""
    makers: Mapping[str, Callable[[Setting, nn.Module, int], Step]] = {
        "plain loop": plain,
        "engine": engine,
        "Accelerate": accelerate,
        "Fabric": fabric,
    }
    found, missing = {}, []
    few = {name: value[:micro_batch_size] for name, value in batch.items()}
    for name, make in makers.items():
        try:
            step = make(setting, decoder(setting), micro_batch_size)
        except ImportError as error:
            missing.append(f"{name} ({error})")
            continue
        for _ in range(NUM_FIRST_STEPS):
            step(few)
        found[name] = timed(setting, step, batch)
    try:
        found["Trainer"] = trainer(setting, decoder(setting), micro_batch_size, batch)
    except ImportError as error:
        missing.append(f"Trainer ({error})")
    return found, missing


def interleaved(found: Mapping[str, Times], rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the median seconds of each round, for everyone, in rounds that begin with another one each."""
    seconds: dict[str, list[float]] = {name: [] for name in found}
    names = list(found)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times = found[name](steps)
            if number:  # the first round warms up
                seconds[name].append(statistics.median(times))
    return seconds


def flops_per_token(model: nn.Module, length: int) -> float:
    """Return the operations of a forward and backward for one token: 6 per weight, and attention (PaLM, appendix B)."""
    config: Any = model.config
    num_weights = sum(p.numel() for name, p in model.named_parameters() if "wpe" not in name)  # positions are looked up
    return float(6 * num_weights + 12 * config.n_layer * config.n_embd * length)


def peak_flops() -> float | None:
    """Return the card's bf16 peak by data sheet; None for a card that is not listed."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((peak for word, peak in PEAK_BF16_FLOPS.items() if word in name), None)


def middle(setting: Setting) -> Rows:
    """Time everyone at an effective batch of four micro-batches."""
    return language(setting, setting.pick(((64, 4, 3),), ((8, 1, 1),), ((4, 1, 1),)))


def smallest_and_largest(setting: Setting) -> Rows:
    """Time everyone without accumulation, and with much of it."""
    return language(setting, setting.pick(((16, 4, 4), (512, 1, 1)), ((4, 1, 1),), ()))


def language(setting: Setting, plans: tuple[tuple[int, int, int], ...]) -> Rows:
    """Time everyone, all in one run for each effective batch size.

    Args:
        setting: where.
        plans: (effective batch size, rounds, steps of each round).
    """
    length, micro = setting.pick((1024, 16), (32, 4), (8, 2))
    cost = flops_per_token(decoder(setting), length)
    peak = peak_flops()
    for size, rounds, steps in plans:
        batch = tokens(setting, size, length)
        found, missing = rivals(setting, micro, batch)
        seconds = interleaved(found, rounds, steps)
        reference = seconds["plain loop"]
        for name, times in seconds.items():
            rate = size * length / statistics.median(times)
            ratio = statistics.median(mine / other for mine, other in zip(times, reference, strict=True))
            cells = {
                "effective batch": f"{size} = {size // micro} x {micro}",
                "trainer": name,
                "tokens/s": f"{rate:,.0f}",
                "time / plain loop": f"{ratio:.3f}",
                "share of peak": "-" if peak is None else f"{100 * rate * cost / peak:.1f}%",
                "ms per step": f"{1e3 * statistics.median(times):.2f}",
            }
            yield Row(TOKENS, cells)
        for name in missing:
            yield Row("Not installed", {"trainer": name})
        del found, seconds
        free(setting)


def free(setting: Setting) -> None:
    """Give the memory of earlier models back."""
    gc.collect()
    if setting.on_gpu:
        torch.cuda.empty_cache()


def synchronisations(setting: Setting) -> Rows:
    """Count how often a steady step makes the host wait for the device, and where."""
    length, micro = setting.pick((1024, 16), (32, 4), (8, 2))
    batch = tokens(setting, 4 * micro, length)
    for name, make in (("engine", engine), ("plain loop", plain), ("Accelerate", accelerate), ("Fabric", fabric)):
        try:
            step = make(setting, decoder(setting), micro)
        except ImportError as error:
            yield Row(SYNCS, {"trainer": name, "synchronisations": "not installed", "at": str(error)})
            continue
        for _ in range(NUM_FIRST_STEPS):
            step(batch)
        setting.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with sync_debug(setting):
                step(batch)
        places = [
            f"{'/'.join(Path(w.filename).parts[-3:])}:{w.lineno}"
            for w in caught
            if "called a synchronizing" in str(w.message)
        ]
        at = ", ".join(dict.fromkeys(places)) or "-"
        yield Row(SYNCS, {"trainer": name, "synchronisations": str(len(places)), "at": at})
        del step
        free(setting)


@contextlib.contextmanager
def sync_debug(setting: Setting) -> Iterator[None]:
    """Let torch warn of each synchronisation."""
    if not setting.on_gpu:
        yield
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def images(setting: Setting) -> Rows:
    """Compare a plain loop and the engine on a ResNet-50."""
    try:
        from torchvision.models import resnet18, resnet50  # noqa: PLC0415
    except ImportError as error:
        yield Row(IMAGES, {"trainer": "not measured", "effective batch": f"{error}"})
        return
    make = resnet50 if setting.size == "full" else resnet18
    num_samples, micro, side = setting.pick((512, 128, 224), (8, 4, 64), (4, 2, 32))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 3, side, side, generator=generator).contiguous(memory_format=torch.channels_last)
    batch = {"x": x, "labels": torch.randint(0, 1000, (num_samples,), generator=generator)}
    if setting.on_gpu:
        batch = {name: value.pin_memory() for name, value in batch.items()}

    def image_loss(model: nn.Module, piece: Batch) -> torch.Tensor:
        return functional.cross_entropy(model(piece["x"]), piece["labels"])

    def model() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = make()
        return made.to(setting.device, memory_format=torch.channels_last)

    def by_hand() -> Step:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

        def step(whole: Batch) -> None:
            for piece in pieces(whole, micro, setting.device):
                with autocast(setting):
                    value = image_loss(net, piece)
                (value * (micro / num_samples)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    def by_engine() -> Step:
        net = model()
        return ab.Engine(
            net,
            torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
            ab.mean_over_samples(image_loss),
            micro_batch_size=micro,
            precision="bf16",
            norms="keep",
            measure_gradient_norm=False,
            world=ab.World.from_environment(device=setting.device),
        ).step

    found = {name: timed(setting, step, batch) for name, step in (("plain loop", by_hand()), ("engine", by_engine()))}
    seconds = interleaved(found, *setting.pick((6, 3), (2, 2), (1, 1)))
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(times, seconds["plain loop"], strict=True))
        cells = {"images/s": f"{num_samples / statistics.median(times):,.0f}", "time / plain loop": f"{ratio:.3f}"}
        yield Row(IMAGES, {"trainer": name, "effective batch": f"{num_samples // micro} x {micro}", **cells})
    free(setting)


def matrix_product(setting: Setting) -> Rows:
    """Measure the rate of a large bf16 matrix product, the real limit of this card."""
    size = setting.pick(8192, 256, 64)
    one = torch.randn(size, size, device=setting.device, dtype=torch.bfloat16)
    other = torch.randn(size, size, device=setting.device, dtype=torch.bfloat16)
    times = timed(setting, lambda _: one @ other, {})(10)
    rate = 2 * size**3 / statistics.median(times)
    yield Row(MATMUL, {"product": f"{size} x {size}, bf16", "TFLOP/s": f"{rate / 1e12:.0f}"})


def compiled(setting: Setting) -> Rows:
    """Time a plain loop and the engine on a compiled model, at one size."""
    if not setting.on_gpu:
        return
    length, micro = setting.pick((1024, 16), (32, 4), (8, 2))
    batch = tokens(setting, 4 * micro, length)
    found = {}
    for name, make in (("plain loop", plain), ("engine", engine)):
        model: Any = torch.compile(decoder(setting))
        begin = time.perf_counter()
        step = make(setting, model, micro)
        step(batch)
        setting.synchronize()
        print(f"  {name}: first compiled step took {time.perf_counter() - begin:.0f} s", flush=True)
        found[name] = timed(setting, step, batch)
    peak, cost = peak_flops(), flops_per_token(decoder(setting), length)
    seconds = interleaved(found, *setting.pick((4, 4), (1, 1), (1, 1)))
    for name, times in seconds.items():
        rate = 4 * micro * length / statistics.median(times)
        ratio = statistics.median(a / b for a, b in zip(times, seconds["plain loop"], strict=True))
        cells = {
            "effective batch": f"{4 * micro} = 4 x {micro}",
            "trainer": f"{name}, torch.compile",
            "tokens/s": f"{rate:,.0f}",
            "time / plain loop": f"{ratio:.3f}",
            "share of peak": "-" if peak is None else f"{100 * rate * cost / peak:.1f}%",
            "ms per step": f"{1e3 * statistics.median(times):.2f}",
        }
        yield Row(TOKENS, cells)


CHECKS = (middle, synchronisations, images, compiled, smallest_and_largest, matrix_product)
