"""Measurements of claims about training results: complete runs, over several seeds."""

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import anybatch as ab
from anybatch.recipes import contrastive as recipe
from anybatch.recipes.digits import Digits
from anybatch.recipes.start import start
from anybatch_guide.claims.claim import Numbers
from anybatch_guide.claims.equality import error_of
from anybatch_guide.claims.measuring import new_model, relative
from anybatch_guide.experiment import Emit, emit_progress
from anybatch_guide.mistakes.mistake import loop_of
from anybatch_guide.tasks.task import MicroBatches, PlaygroundTask, cross_entropy, load

SEEDS = (0, 1, 2)
NUM_STEPS = 80
NUM_EPOCHS = 2


def forgetting(emit: Emit) -> Numbers:
    """Train digits, 4 x 16 samples per step, with and without dividing by 16, with SGD and with Adam."""
    task = load("digits")
    optimizers: dict[str, Callable[..., Optimizer]] = {
        "sgd": partial(torch.optim.SGD, lr=0.3),
        "adam": partial(torch.optim.Adam, lr=0.003),
    }
    numbers: dict[str, float] = {"chance": task.chance}
    cells = [(name, loop) for name in optimizers for loop in ("right", "no_division")]
    for done, (name, loop) in enumerate(cells):
        losses = []
        for number, seed in enumerate(SEEDS):
            emit_progress(emit, done * len(SEEDS) + number, len(cells) * len(SEEDS), f"{name}, {loop}")
            losses.append(final_loss(task, loop, optimizers[name], seed))
        numbers[f"{name}_{loop}"] = statistics.median(losses)
    return numbers


def final_loss(task: PlaygroundTask, loop: str, optimizer: Callable[..., Optimizer], seed: int) -> float:
    """Train in windows of 16 micro-batches of 4 samples, and return the mean loss over all training samples.

    A loss that is not finite counts as infinite.
    """
    model = new_model(task, seed)
    attached_optimizer = optimizer(model.parameters())
    loader = MicroBatches(task.rows, 4, seed)
    for _ in range(NUM_EPOCHS):
        loop_of(loop)(
            model,
            loader,
            optimizer=attached_optimizer,
            # The loops need a scheduler; this one keeps the learning rate.
            scheduler=LambdaLR(attached_optimizer, lambda _: 1.0),
            criterion=cross_entropy,
            accumulation_steps=16,
            max_norm=math.inf,
        )
    with torch.no_grad():
        loss = float(cross_entropy(model(task.rows.inputs), task.rows.targets))
    return loss if math.isfinite(loss) else math.inf


def contrastive(emit: Emit) -> Numbers:
    """Train two encoders with `ab.joint` and with a loss per micro-batch; compare retrieval and first gradients."""
    job = recipe.contrastive()
    plain = replace(job, loss=ab.mean_over_samples(_loss_of_micro_batch))
    ways = {"joint": (job, 16), "16": (plain, 16), "4": (plain, 4)}
    numbers: dict[str, float] = {}
    for done, (name, (way, size)) in enumerate(ways.items()):
        accuracies = []
        for number, seed in enumerate(SEEDS):
            emit_progress(emit, done * len(SEEDS) + number, len(ways) * len(SEEDS), f"{name}, seed {seed}")
            accuracies.append(_retrieval(way, size, seed))
        numbers[f"accuracy_{name}"] = 100 * statistics.fmean(accuracies)
    expected = _first_gradient(job, 256)
    return numbers | {
        "chance": 100 / 360,
        "plain_error": relative(_first_gradient(plain, 16), expected),
        "joint_error": relative(_first_gradient(job, 16), expected),
    }


def _loss_of_micro_batch(model: recipe.Encoders, batch: dict[str, Tensor]) -> Float[Tensor, ""]:
    return recipe.loss(model, recipe.encode(model, batch))


def _retrieval(job: ab.Job, micro_batch_size: int, seed: int) -> float:
    """Return the held-out retrieval accuracy after 15 epochs."""
    run = start(job, ab.RunConfig(epochs=15, micro_batch_size=micro_batch_size, seed=seed), check_loss=False)
    for batch in run.batches:
        run.engine.step(batch)
    return run.evaluate()["retrieval_accuracy"]


def _first_gradient(job: ab.Job, micro_batch_size: int) -> Float[Tensor, " number"]:
    """Return the gradient of the first 256 training images: the change in a step of SGD with learning rate 1."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEEDS[0])
        model = recipe.Encoders().double()
    before = parameters_to_vector(model.parameters()).detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    images = torch.stack([Digits("train")[number]["image"] for number in range(256)]).double()
    with ab.Engine(model, optimizer, job.loss, micro_batch_size=micro_batch_size, check_loss=False) as engine:
        engine.step({"image": images})
    return before - parameters_to_vector(model.parameters()).detach()


def batch_norm(emit: Emit) -> Numbers:
    """Train shapes at 64 samples per step, with BatchNorm at three micro-batch sizes, and with GroupNorm at one."""
    normed, grouped = load("shapes", norm="batch"), load("shapes", norm="group")
    emit_progress(emit, 0, 3 * len(SEEDS) + 1, "gradients")
    numbers = {
        "gradient_error": statistics.median(error_of(normed, [4] * 16, seed=seed) for seed in SEEDS),
        "group_norm_error": statistics.median(error_of(grouped, [4] * 16, seed=seed) for seed in SEEDS),
    }
    for done, size in enumerate((64, 16, 4)):
        accuracies, losses = [], []
        for number, seed in enumerate(SEEDS):
            emit_progress(emit, 1 + done * len(SEEDS) + number, 3 * len(SEEDS) + 1, f"micro-batches of {size}")
            loss, accuracy = _trained(normed, size, seed)
            losses.append(loss)
            accuracies.append(accuracy)
        numbers[f"loss_{size}"] = statistics.median(losses)
        numbers[f"accuracy_{size}"] = 100 * statistics.median(accuracies)
    return numbers


def _trained(task: PlaygroundTask, micro_batch_size: int, seed: int) -> tuple[float, float]:
    """Return the mean loss of the last ten steps, and the held-out accuracy."""
    model = new_model(task, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    data = ab.batches(task.rows, effective_batch_size=64, steps=NUM_STEPS, seed=seed)
    with ab.Engine(model, optimizer, task.loss, micro_batch_size=micro_batch_size) as engine:
        losses = [engine.step(batch).loss for batch in data]
    return statistics.fmean(losses[-10:]), accuracy_of(model, task)


@torch.no_grad()
def accuracy_of(model: nn.Module, task: PlaygroundTask) -> float:
    """Return the accuracy on held-out samples."""
    # Use running statistics, so that the accuracy does not depend on the split of held-out data.
    model.eval()
    is_correct = model(task.held_out.inputs).argmax(dim=1) == task.held_out.targets
    model.train()
    return float(is_correct.double().mean())
