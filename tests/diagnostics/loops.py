"""Correct and incorrect training loops with the findings that `check_loop` must make.

They are written as users write them: no annotations, no docstrings, faults included.
"""
# The loops look like users' code, so some rules for ours do not apply:
# ruff: noqa: ANN001, ANN201, ARG001, D103, N817, PLR0917
# mypy: ignore-errors

import itertools

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

# Correct, each in a different way


def right_by_window(model, loader, optimizer, accumulation_steps, epochs):
    for _ in range(epochs):
        batches = iter(loader)
        while window := list(itertools.islice(batches, accumulation_steps)):
            num_samples = sum(len(labels) for _, labels in window)
            for inputs, labels in window:
                loss = F.cross_entropy(model(inputs), labels, reduction="sum") / num_samples
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def right_by_scaling_at_the_end(net, train_loader, opt, grad_accum, device, criterion):
    net.train()
    count = 0
    for i, batch in enumerate(train_loader):
        x, y = batch["image"].to(device), batch["label"].to(device)
        (criterion(net(x), y) * len(y)).backward()
        count += len(y)
        if (i + 1) % grad_accum == 0 or i + 1 == len(train_loader):
            for p in net.parameters():
                p.grad /= count
            clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            count = 0


def right_by_cutting(model, dataloader, optimizer, accumulation_steps, num_epochs=1):
    total, seen = 0.0, 0
    for _ in range(num_epochs):
        for inputs, targets in dataloader:
            optimizer.zero_grad(set_to_none=False)
            size = -(-len(targets) // accumulation_steps)
            for x, y in zip(inputs.split(size), targets.split(size), strict=True):
                loss = F.mse_loss(model(x), y) * len(y) / len(targets)
                loss.backward()
                total += loss.item() * len(targets)
            seen += len(targets)
            optimizer.step()
    return {"train_loss": total / seen}


def right_with_all_else(model, loader, accumulation_steps, epochs):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    steps = epochs * -(-len(loader) // accumulation_steps)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(epochs):
        batches, left = iter(loader), len(loader)
        while left:
            window = [next(batches) for _ in range(min(left, accumulation_steps))]
            left -= len(window)
            total = sum(len(batch["labels"]) for batch in window)
            for batch in window:
                loss = model(**batch).loss * len(batch["labels"]) / total
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()


def right_on_tokens(model, loader, optimizer, accumulation_steps, epochs):
    for _ in range(epochs):
        batches = iter(loader)
        while window := list(itertools.islice(batches, accumulation_steps)):
            num_targets = sum((batch["labels"][:, 1:] != -100).sum() for batch in window)
            for batch in window:
                logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
                (loss / num_targets).backward()
            optimizer.step()
            optimizer.zero_grad()


def right_by_one_backward(model, loader, optimizer, accumulation_steps, epochs):
    for _ in range(epochs):
        total, count = 0, 0
        for i, (x, y) in enumerate(loader):
            total = total + F.cross_entropy(model(x), y, reduction="sum")
            count += len(y)
            if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
                (total / count).backward()
                optimizer.step()
                optimizer.zero_grad()
                total, count = 0, 0
        model.eval()
        with torch.no_grad():
            for x, _ in loader:
                model(x)
        model.train()


def right_with_its_own_loader(model, train_dataset, accumulation_steps, epochs=1):
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(epochs):
        batches = iter(DataLoader(train_dataset, batch_size=2, shuffle=True))
        while window := list(itertools.islice(batches, accumulation_steps)):
            num_samples = sum(len(y) for _, y in window)
            for x, y in window:
                (F.cross_entropy(model(x), y) * len(y) / num_samples).backward()
            optimizer.step()
            optimizer.zero_grad()


def right_with_class_weights(model, loader, optimizer, accumulation_steps, max_steps):
    weights = torch.tensor([0.1, 2.0, 1.0, 0.5, 3.0], dtype=torch.float64)
    step = 0
    while step < max_steps:
        batches = iter(loader)
        while step < max_steps and (window := list(itertools.islice(batches, accumulation_steps))):
            total = sum(weights[y].sum() for _, y in window)
            for x, y in window:
                (0.5 * F.cross_entropy(model(x), y, weight=weights, reduction="sum") / total).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1


def right_on_demand(model, data, optimizer, steps=6, grad_accum=4):
    for _ in range(steps):
        for _ in range(grad_accum):
            x, y = data.next_batch()
            (F.cross_entropy(model(x), y) / grad_accum).backward()
        optimizer.step()
        optimizer.zero_grad()


def class_weights_per_micro_batch(model, loader, optimizer, accumulation_steps):
    weights = torch.tensor([0.1, 2.0, 1.0, 0.5, 3.0])
    batches = iter(loader)
    while window := list(itertools.islice(batches, accumulation_steps)):
        for x, y in window:
            (F.cross_entropy(model(x), y, weight=weights) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def looks_ahead(model, loader, optimizer, accumulation_steps):
    batches = iter(loader)
    x, y = next(batches)
    while True:
        for _ in range(accumulation_steps):
            _, loss = model(x, y)
            x, y = next(batches, (None, None))
            if x is None:
                return
            (loss / accumulation_steps).backward()
        optimizer.step()
        optimizer.zero_grad()


def right_in_float32(model, loader, optimizer, accumulation_steps):
    model.float()
    batches = iter(loader)
    while window := list(itertools.islice(batches, accumulation_steps)):
        num_samples = sum(len(y) for _, y in window)
        for x, y in window:
            (F.cross_entropy(model(x.float()), y, reduction="sum") / num_samples).backward()
        optimizer.step()
        optimizer.zero_grad()


def right_for_ever(model, get_batch, optimizer):
    x, y = get_batch("train")
    while True:
        for _ in range(5):
            _, loss = model(x, y)
            x, y = get_batch("train")
            (loss / 5).backward()
        optimizer.step()
        optimizer.zero_grad()


def right_for_ever_by_forty(model, get_batch, optimizer):
    while True:
        for _ in range(40):
            _, loss = model(*get_batch("train"))
            (loss / 40).backward()
        optimizer.step()
        optimizer.zero_grad()


def right_by_number_of_shifted_items(model, train_dataloader, optimizer, accumulation_steps):
    batches = iter(train_dataloader)
    while window := list(itertools.islice(batches, accumulation_steps)):
        num_items = sum((batch["labels"][..., 1:] != -100).sum() for batch in window)
        for batch in window:
            model(**batch, num_items_in_batch=num_items).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def right_with_ignored_labels(model, train_loader, optimizer, accumulation_steps):
    batches = iter(train_loader)
    while window := list(itertools.islice(batches, accumulation_steps)):
        total = sum((y != 0).sum() for _, y in window)
        for x, y in window:
            (F.cross_entropy(model(x), y, ignore_index=0, reduction="sum") / total).backward()
        optimizer.step()
        optimizer.zero_grad()


def right_with_a_linear_critic(generator, critic, loader, optimizer_g, optimizer_critic):
    for real, _ in loader:
        noise = torch.randn(len(real), 100)
        optimizer_critic.zero_grad()
        (critic(generator(noise).detach()).mean() - critic(real).mean()).backward()
        optimizer_critic.step()
        optimizer_g.zero_grad()
        (-critic(generator(noise)).mean()).backward()
        optimizer_g.step()


def right_with_encoder_and_decoder(encoder, decoder, loader, encoder_optimizer, decoder_optimizer, criterion):
    for source, target in loader:
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        memory, hidden = encoder(source)
        outputs, _ = decoder(memory, hidden)
        criterion(outputs.view(-1, outputs.size(-1)), target.view(-1)).backward()
        encoder_optimizer.step()
        decoder_optimizer.step()


def right_with_a_teacher(student, teacher, loader, optimizer, accumulation_steps):
    batches = iter(loader)
    while window := list(itertools.islice(batches, accumulation_steps)):
        total = sum(len(y) for _, y in window)
        for x, _ in window:
            with torch.no_grad():
                goal = F.normalize(teacher(x), dim=-1)
            ((2 - 2 * (F.normalize(student(x), dim=-1) * goal).sum(-1)).sum() / total).backward()
        optimizer.step()
        optimizer.zero_grad()


# Incorrect


def divided_by_steps(model, dataloader, optimizer, accumulation_steps):
    for i, (inputs, labels) in enumerate(dataloader):
        loss = F.cross_entropy(model(inputs), labels)
        loss = loss / accumulation_steps
        loss.backward()
        if (i + 1) % accumulation_steps == 0 or (i + 1) == len(dataloader):
            optimizer.step()
            optimizer.zero_grad()


def not_divided(model, loader, optimizer, accumulation_steps, epochs):
    for _ in range(epochs):
        for i, (x, y) in enumerate(loader):
            F.cross_entropy(model(x), y).backward()
            if (i + 1) % accumulation_steps == 0 or i == len(loader) - 1:
                optimizer.step()
                optimizer.zero_grad()


def divided_twice(model, loader, optimizer, accumulation_steps, epochs):
    for _ in range(epochs):
        batches = iter(loader)
        while window := list(itertools.islice(batches, accumulation_steps)):
            num_samples = sum(len(labels) for _, labels in window)
            for inputs, labels in window:
                loss = F.cross_entropy(model(inputs), labels, reduction="sum") / num_samples
                (loss / accumulation_steps).backward()
            optimizer.step()
            optimizer.zero_grad()


def tail_dropped(model, loader, optimizer, accumulation_steps, epochs):
    for _ in range(epochs):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y) / accumulation_steps
            loss.backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()


def tail_carried(model, loader, optimizer, accumulation_steps, epochs):
    for _ in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y) / accumulation_steps
            loss.backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()


def zero_grad_missing(model, loader, optimizer, k, criterion):
    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / k).backward()
        if (i + 1) % k == 0 or i + 1 == len(loader):
            optimizer.step()


def zero_grad_in_each_micro_batch(model, loader, optimizer, accumulation_steps):
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) / accumulation_steps
        loss.backward()
        if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
            optimizer.step()


def zero_grad_before_the_step(model, loader, optimizer, accumulation_steps):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y) / accumulation_steps
        loss.backward()
        if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
            optimizer.zero_grad()
            optimizer.step()


def step_in_each_micro_batch(model, loader, optimizer, accumulation_steps):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y) / accumulation_steps
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def window_from_zero(model, loader, optimizer, accumulation_steps):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y) / accumulation_steps
        loss.backward()
        if i % accumulation_steps == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()


def clip_in_each_micro_batch(model, loader, optimizer, accumulation_steps, max_norm):
    batches = iter(loader)
    while window := list(itertools.islice(batches, accumulation_steps)):
        num_samples = sum(len(labels) for _, labels in window)
        for inputs, labels in window:
            (F.cross_entropy(model(inputs), labels, reduction="sum") / num_samples).backward()
            clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()


def clip_after_the_step(model, loader, optimizer, accumulation_steps, max_norm):
    batches = iter(loader)
    while window := list(itertools.islice(batches, accumulation_steps)):
        num_samples = sum(len(labels) for _, labels in window)
        for inputs, labels in window:
            (F.cross_entropy(model(inputs), labels, reduction="sum") / num_samples).backward()
        optimizer.step()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.zero_grad()


def schedule_in_each_micro_batch(model, loader, optimizer, scheduler, accumulation_steps):
    batches = iter(loader)
    while window := list(itertools.islice(batches, accumulation_steps)):
        num_samples = sum(len(labels) for _, labels in window)
        for inputs, labels in window:
            (F.cross_entropy(model(inputs), labels, reduction="sum") / num_samples).backward()
            scheduler.step()
        optimizer.step()
        optimizer.zero_grad()


def token_means(model, loader, optimizer, accumulation_steps, epochs):
    for _ in range(epochs):
        batches = iter(loader)
        while window := list(itertools.islice(batches, accumulation_steps)):
            for batch in window:
                logits, labels = model(batch["input_ids"]), batch["labels"]
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
                (loss / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()


def fixed_number_of_steps(model, loader, optimizer):
    accumulation = 4
    for i, (x, y) in enumerate(loader):
        (F.cross_entropy(model(x), y) / 8).backward()
        if (i + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()


def short_of_data(model, loader, optimizer, accumulation_steps):
    for i, (x, y) in enumerate(loader):
        if i == 6:
            break
        (F.cross_entropy(model(x), y) / accumulation_steps).backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()


def across_samples(model, loader, optimizer, accumulation_steps):
    for i, (x, y) in enumerate(loader):
        z = F.normalize(model(x), dim=1)
        loss = F.cross_entropy(z @ F.normalize(y.double()[:, None] + z.detach(), dim=1).T, torch.arange(len(z)))
        (loss / accumulation_steps).backward()
        if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()


def endless(model, loader, optimizer, accumulation_steps):
    batches = itertools.cycle(list(loader)[:6])
    while True:
        for _ in range(accumulation_steps):
            x, y = next(batches)
            (F.cross_entropy(model(x), y) / accumulation_steps).backward()
        optimizer.step()
        optimizer.zero_grad()


def spinning(model, loader, optimizer, accumulation_steps):
    while True:
        pass


def without_steps(model, loader, optimizer, accumulation_steps):
    for x, y in loader:
        (F.cross_entropy(model(x), y) / accumulation_steps).backward()


# On several ranks


def ddp_right(model, dataset, optimizer, accumulation_steps, batch_size, epochs):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DDP(model)
    share = Subset(dataset, range(rank, len(dataset), world_size))
    for _ in range(epochs):
        batches = iter(DataLoader(share, batch_size))
        while window := list(itertools.islice(batches, accumulation_steps)):
            count = torch.tensor(float(sum(len(y) for _, y in window)))
            dist.all_reduce(count)
            for i, (x, y) in enumerate(window):
                model.require_backward_grad_sync = i + 1 == len(window)
                loss = F.cross_entropy(model(x), y, reduction="sum") * world_size / count
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def all_reduce_right(model, loader, optimizer, accumulation_steps):
    batches = iter(loader)
    while window := list(itertools.islice(batches, accumulation_steps)):
        count = torch.tensor(float(sum(len(y) for _, y in window)))
        dist.all_reduce(count)
        for x, y in window:
            (F.cross_entropy(model(x), y, reduction="sum") / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()


def ddp_without_sampler(model, dataset, optimizer, accumulation_steps, batch_size, epochs):
    model = DDP(model)
    for _ in range(epochs):
        batches = iter(DataLoader(dataset, batch_size, shuffle=False))
        while window := list(itertools.islice(batches, accumulation_steps)):
            num_samples = sum(len(y) for _, y in window)
            for i, (x, y) in enumerate(window):
                model.require_backward_grad_sync = i + 1 == len(window)
                (F.cross_entropy(model(x), y, reduction="sum") / num_samples).backward()
            optimizer.step()
            optimizer.zero_grad()


def ddp_padded(model, dataset, optimizer, accumulation_steps, batch_size, epochs):
    model = DDP(model)
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        while window := list(itertools.islice(batches, accumulation_steps)):
            num_samples = sum(len(y) for _, y in window)
            for i, (x, y) in enumerate(window):
                model.require_backward_grad_sync = i + 1 == len(window)
                (F.cross_entropy(model(x), y, reduction="sum") / num_samples).backward()
            optimizer.step()
            optimizer.zero_grad()


def ddp_no_sync_round_the_backward(model, loader, optimizer, accumulation_steps, world_size):
    batches = iter(loader)
    while window := list(itertools.islice(batches, accumulation_steps)):
        count = torch.tensor(float(sum(len(y) for _, y in window)))
        dist.all_reduce(count)
        for i, (x, y) in enumerate(window):
            loss = F.cross_entropy(model(x), y, reduction="sum") * world_size / count
            if i + 1 < len(window):
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp_without_no_sync(model, loader, optimizer, accumulation_steps, world_size):
    model = DDP(model)
    batches = iter(loader)
    while window := list(itertools.islice(batches, accumulation_steps)):
        count = torch.tensor(float(sum(len(y) for _, y in window)))
        dist.all_reduce(count)
        for x, y in window:
            (F.cross_entropy(model(x), y, reduction="sum") * world_size / count).backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp_tail_never_synced(model, loader, optimizer, accumulation_steps):
    model = DDP(model)
    for i, (x, y) in enumerate(loader):
        if (i + 1) % accumulation_steps:
            with model.no_sync():
                (F.cross_entropy(model(x), y) / accumulation_steps).backward()
        else:
            (F.cross_entropy(model(x), y) / accumulation_steps).backward()
        if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()


def ddp_means_of_ranks(model, loader, optimizer, accumulation_steps):
    model = DDP(model)
    batches = iter(loader)
    while window := list(itertools.islice(batches, accumulation_steps)):
        num_samples = sum(len(y) for _, y in window)
        for i, (x, y) in enumerate(window):
            model.require_backward_grad_sync = i + 1 == len(window)
            (F.cross_entropy(model(x), y, reduction="sum") / num_samples).backward()
        optimizer.step()
        optimizer.zero_grad()


def raises_on_ranks(model, loader, optimizer, accumulation_steps):
    message = f"rank {dist.get_rank()} is broken"
    raise ValueError(message)


RIGHT = (
    *(right_by_window, right_by_scaling_at_the_end, right_by_cutting, right_by_one_backward),
    *(right_with_its_own_loader, right_with_class_weights, right_in_float32, right_on_demand),
    *(right_for_ever, right_with_ignored_labels),
)
RIGHT_WITH_MODELS = (right_with_a_linear_critic, right_with_encoder_and_decoder, right_with_a_teacher)
WRONG = {
    divided_by_steps: {"constant_divisor", "mean_of_means"},
    not_divided: {"not_divided", "mean_of_means"},
    divided_twice: {"constant_factor"},
    tail_dropped: {"tail_dropped"},
    tail_carried: {"tail_carried"},
    zero_grad_missing: {"zero_grad_missing"},
    zero_grad_in_each_micro_batch: {"zero_grad_inside_window"},
    zero_grad_before_the_step: {"zero_grad_before_step"},
    step_in_each_micro_batch: {"steps_every_micro_batch"},
    window_from_zero: {"window_size", "constant_divisor"},
    clip_in_each_micro_batch: {"clips_every_micro_batch"},
    schedule_in_each_micro_batch: {"schedules_every_micro_batch"},
    fixed_number_of_steps: {"constant_factor", "mean_of_means"},
    short_of_data: {"samples_missing"},
    across_samples: {"not_a_weighted_sum"},
    endless: {"does_not_end"},
    without_steps: {"never_steps"},
    class_weights_per_micro_batch: {"mean_of_weighted_means"},
    clip_after_the_step: {"clips_after_step"},
    looks_ahead: {"tail_carried"},
}
RIGHT_ON_RANKS = (ddp_right, all_reduce_right)
WRONG_ON_RANKS = {
    ddp_without_sampler: {"ranks_share_samples"},
    ddp_padded: {"samples_duplicated"},
    ddp_no_sync_round_the_backward: {"reduces_every_micro_batch"},
    ddp_without_no_sync: {"reduces_every_micro_batch"},
    ddp_tail_never_synced: {"not_reduced"},
    ddp_means_of_ranks: {"uneven_ranks"},
}
CASES: dict = {loop: set() for loop in (*RIGHT, *RIGHT_WITH_MODELS, *RIGHT_ON_RANKS)} | WRONG | WRONG_ON_RANKS
"""Loop -> the codes of its faults."""
