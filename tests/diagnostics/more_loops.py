"""Twenty more training loops in the style of public repositories, ten of them right, with their expected findings.

They were written before `check_loop` could run all of them: state kept in the model, two models, outputs in tuples,
samples without a gradient, advantages and positives counted per micro-batch.
"""
# The loops look like users' code, so some rules for ours do not apply:
# ruff: noqa: A001, ANN001, ANN201, ARG001, B007, B905, D103, F841, N803, N806, N817, PLR0917, PLW2901
# mypy: ignore-errors

import contextlib
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_


def windows_of(loader, number):
    batches = iter(loader)
    while window := list(itertools.islice(batches, number)):
        yield window


# Right


def llama2_c(model, get_batch, optimizer, gradient_accumulation_steps, max_iters, grad_clip):
    scaler = torch.cuda.amp.GradScaler(enabled=True)
    raw_model = model
    X, Y = get_batch("train")
    iter_num = 0
    while True:
        for _ in range(gradient_accumulation_steps):
            logits = model(X, Y)
            loss = raw_model.last_loss
            loss = loss / gradient_accumulation_steps
            X, Y = get_batch("train")
            scaler.scale(loss).backward()
        if grad_clip != 0.0:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        iter_num += 1
        if iter_num >= max_iters:
            break


def repackage_hidden(h):
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


def word_language_model(args, model, train_loader, optimizer):
    criterion = nn.CrossEntropyLoss(ignore_index=-100)
    for _ in range(args.epochs):
        model.train()
        total_loss = 0.0
        hidden = model.init_hidden(args.batch_size)
        for batch, (data, targets) in enumerate(train_loader):
            model.zero_grad()
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
            loss = criterion(output.reshape(-1, output.size(-1)), targets.reshape(-1))
            loss.backward()
            clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            total_loss += loss.item()


def dcgan(netD, netG, dataloader, optimizerD, optimizerG, device, num_epochs):
    criterion, nz, real_label, fake_label = nn.BCELoss(), 100, 1.0, 0.0
    for epoch in range(num_epochs):
        for i, data in enumerate(dataloader, 0):
            netD.zero_grad()
            real_cpu = data[0].to(device)
            batch_size = real_cpu.size(0)
            label = torch.full((batch_size,), real_label, dtype=real_cpu.dtype, device=device)
            output = netD(real_cpu)
            errD_real = criterion(output, label)
            errD_real.backward()
            noise = torch.randn(batch_size, nz, 1, 1, device=device)
            fake = netG(noise)
            label.fill_(fake_label)
            output = netD(fake.detach())
            errD_fake = criterion(output, label)
            errD_fake.backward()
            errD = errD_real + errD_fake
            optimizerD.step()

            netG.zero_grad()
            label.fill_(real_label)
            output = netD(fake)
            errG = criterion(output, label)
            errG.backward()
            optimizerG.step()


def knowledge_distillation(student, teacher, train_loader, optimizer, criterion, device, T=4.0, alpha=0.9):
    teacher.eval()
    student.train()
    for inputs, labels in train_loader:
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        with torch.no_grad():
            teacher_logits = teacher(inputs)
        student_logits = student(inputs)
        soft = F.kl_div(
            F.log_softmax(student_logits / T, dim=-1), F.softmax(teacher_logits / T, dim=-1), reduction="batchmean"
        )
        loss = alpha * T * T * soft + (1 - alpha) * criterion(student_logits, labels)
        loss.backward()
        optimizer.step()


def torchtune_recipe(model, dataloader, optimizer, lr_scheduler, gradient_accumulation_steps, epochs):
    for _ in range(epochs):
        running_loss, num_tokens = 0, 0
        for idx, batch in enumerate(dataloader):
            labels = batch["labels"]
            current_num_tokens = (labels[..., 1:] != -100).sum()
            num_tokens += current_num_tokens
            logits = model(batch["tokens"])[..., :-1, :]
            loss = F.cross_entropy(logits.flatten(0, -2), labels[..., 1:].flatten(), ignore_index=-100)
            current_loss = loss * current_num_tokens
            running_loss += current_loss.detach()
            current_loss.backward()
            if (idx + 1) % gradient_accumulation_steps == 0 or idx + 1 == len(dataloader):
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad *= 1 / num_tokens
                clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                lr_scheduler.step()
                running_loss, num_tokens = 0, 0


def semi_supervised(model, train_loader, optimizer, accum_iter, epochs):
    for _ in range(epochs):
        for window in windows_of(train_loader, accum_iter):
            num_labelled = sum(int((target > 2).sum()) for _, target in window)
            optimizer.zero_grad()
            for data, target in window:
                has_label = (target > 2).to(data.dtype)
                per_sample = F.cross_entropy(model(data), target, reduction="none")
                loss = (per_sample * has_label).sum() / max(num_labelled, 1)
                loss.backward()
            optimizer.step()


def linear_svm(model, trainloader, optimizer, accumulation_steps):
    for window in windows_of(trainloader, accumulation_steps):
        n = sum(len(y) for _, y in window)
        optimizer.zero_grad()
        for x, y in window:
            scores = model(x)
            correct = scores.gather(1, y[:, None])
            margins = F.relu(0.3 + scores - correct).scatter(1, y[:, None], 0.0)
            (margins.amax(1).sum() / n).backward()
        optimizer.step()


def mean_teacher(model, ema_model, train_loader, optimizer, epochs, consistency_weight=10.0):
    global_step = 0
    for _ in range(epochs):
        model.train()
        ema_model.train()
        for input, target in train_loader:
            class_logit, cons_logit = model(input)
            with torch.no_grad():
                ema_logit, _ = ema_model(input)
            class_loss = F.cross_entropy(class_logit, target)
            consistency = F.mse_loss(torch.sigmoid(cons_logit), torch.sigmoid(ema_logit.mean(-1, keepdim=True)))
            loss = class_loss + consistency_weight * consistency
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            global_step += 1
            alpha = min(1 - 1 / (global_step + 1), 0.99)
            for ema_param, param in zip(ema_model.parameters(), model.parameters()):
                ema_param.data.mul_(alpha).add_(param.data, alpha=1 - alpha)


def ddp_by_items(model, train_loader, optimizer, grad_accum_steps, world_size):
    model = DDP(model)
    for window in windows_of(train_loader, grad_accum_steps):
        num_items = torch.tensor(sum(len(y) for _, y in window), dtype=torch.float64)
        dist.all_reduce(num_items)
        for i, (x, y) in enumerate(window):
            context = contextlib.nullcontext() if i == len(window) - 1 else model.no_sync()
            with context:
                loss = F.cross_entropy(model(x), y, reduction="sum") * world_size / num_items
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def ppo_minibatches(agent, loader, optimizer, update_epochs=2, clip_coef=0.2):
    for _ in range(1):
        for obs, actions in loader:
            returns = actions.to(obs.dtype)
            advantages = (returns - returns.mean()) / (returns.std() + 1e-8)
            logits, newvalue = agent(obs)
            logprob = torch.log_softmax(logits, -1).gather(1, actions[:, None]).squeeze(1)
            ratio = (logprob - logprob.detach()).exp()
            pg_loss1 = -advantages * ratio
            pg_loss2 = -advantages * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
            pg_loss = torch.max(pg_loss1, pg_loss2).mean()
            v_loss = 0.5 * ((newvalue.view(-1) - returns) ** 2).mean()
            loss = pg_loss + v_loss * 0.5
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


# Wrong


def clips_too_late(model, train_loader, optimizer, accumulation_steps, epochs):
    for _ in range(epochs):
        for window in windows_of(train_loader, accumulation_steps):
            total = sum(len(y) for _, y in window)
            for x, y in window:
                (F.cross_entropy(model(x), y, reduction="sum") / total).backward()
            optimizer.step()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.zero_grad()


def retinanet(model, data_loader, optimizer, accum_steps, max_epochs):
    for _ in range(max_epochs):
        for window in windows_of(data_loader, accum_steps):
            for images, targets in window:
                cls_logits = model(images)
                one_hot = F.one_hot(targets, cls_logits.size(-1)).to(cls_logits)
                p = torch.sigmoid(cls_logits)
                ce = F.binary_cross_entropy_with_logits(cls_logits, one_hot, reduction="none")
                focal = ce * (1 - (p * one_hot + (1 - p) * (1 - one_hot))) ** 2
                num_pos = (targets > 0).sum().clamp(min=1)
                loss = focal.sum() / num_pos
                (loss / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()


def a2c(policy, rollouts, optimizer, accumulation_steps):
    for window in windows_of(rollouts, accumulation_steps):
        total = sum(len(actions) for _, actions in window)
        optimizer.zero_grad()
        for obs, actions in window:
            rewards = actions.to(obs.dtype) ** 2
            advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
            log_prob = torch.log_softmax(policy(obs), -1).gather(1, actions[:, None]).squeeze(1)
            loss = -(log_prob * advantage).sum() / total
            loss.backward()
        optimizer.step()


def chunked_batch(model, train_loader, optimizer, criterion, accumulation_steps):
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        for x, y in zip(inputs.chunk(accumulation_steps), targets.chunk(accumulation_steps)):
            loss = criterion(model(x), y) / accumulation_steps
            loss.backward()
        optimizer.step()


def graph_of_the_last(model, dataloader, optimizer, grad_accum, epochs):
    for _ in range(epochs):
        for window in windows_of(dataloader, grad_accum):
            total, n = 0.0, sum(len(y) for _, y in window)
            for x, y in window:
                total = (total.detach() if torch.is_tensor(total) else total) + F.cross_entropy(
                    model(x), y, reduction="sum"
                ) / n
            total.backward()
            optimizer.step()
            optimizer.zero_grad()


def distillation_accumulated(student, teacher, train_loader, optimizer, args):
    accum = args.gradient_accumulation_steps
    for epoch in range(args.epochs):
        for step, (x, y) in enumerate(train_loader):
            with torch.no_grad():
                soft = F.softmax(teacher(x), -1)
            logits = student(x)
            loss = F.kl_div(F.log_softmax(logits, -1), soft, reduction="batchmean") + F.cross_entropy(logits, y)
            (loss / accum).backward()
            if (step + 1) % accum == 0 or step + 1 == len(train_loader):
                optimizer.step()
                optimizer.zero_grad()


def recurrent_not_divided(model, train_loader, optimizer, accumulation_steps, epochs):
    for _ in range(epochs):
        hidden = model.init_hidden(4)
        for i, (x, y) in enumerate(train_loader):
            out, hidden = model(x, repackage_hidden(hidden))
            F.cross_entropy(out, y).backward()
            if (i + 1) % accumulation_steps == 0 or i + 1 == len(train_loader):
                optimizer.step()
                optimizer.zero_grad()


def no_sync_the_wrong_way_round(model, train_loader, optimizer, grad_accum_steps, world_size):
    model = DDP(model)
    for window in windows_of(train_loader, grad_accum_steps):
        num_items = torch.tensor(sum(len(y) for _, y in window), dtype=torch.float64)
        dist.all_reduce(num_items)
        for i, (x, y) in enumerate(window):
            with model.no_sync() if i == len(window) - 1 else contextlib.nullcontext():
                loss = F.cross_entropy(model(x), y, reduction="sum") * world_size / num_items
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def masked_language_model(args, model, train_dataloader, optimizer, lr_scheduler):
    for _ in range(args.num_train_epochs):
        for step, batch in enumerate(train_dataloader):
            logits = model(batch["input_ids"], attention_mask=batch["attention_mask"])
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), batch["labels"].view(-1), ignore_index=-100)
            left = len(train_dataloader) % args.gradient_accumulation_steps
            is_tail = step >= len(train_dataloader) - left
            (loss / (left if is_tail else args.gradient_accumulation_steps)).backward()
            if (step + 1) % args.gradient_accumulation_steps == 0 or step + 1 == len(train_dataloader):
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()


def labelled_means(model, train_loader, optimizer, accum_iter, epochs):
    for _ in range(epochs):
        for window in windows_of(train_loader, accum_iter):
            optimizer.zero_grad()
            for data, target in window:
                labelled = (target > 2).to(data.dtype)
                per_sample = F.cross_entropy(model(data), target, reduction="none")
                loss = (per_sample * labelled).sum() / labelled.sum().clamp(min=1.0)
                (loss / len(window)).backward()
            optimizer.step()


MORE = {
    llama2_c: ("karpathy/llama2.c", set()),
    word_language_model: ("pytorch/examples word_language_model", set()),
    dcgan: ("pytorch/examples dcgan", set()),
    knowledge_distillation: ("distillation loops", set()),
    torchtune_recipe: ("pytorch/torchtune, with a step for the last window", set()),
    semi_supervised: ("loops with a mask of labelled samples", set()),
    linear_svm: ("loops with a hinge loss", set()),
    mean_teacher: ("CuriousAI/mean-teacher", set()),
    ddp_by_items: ("DDP loops that count items", set()),
    ppo_minibatches: ("vwxyzjn/cleanrl", set()),
    clips_too_late: ("forum questions", {"clips_after_step"}),
    retinanet: ("detection loops divided by positives", {"mean_of_weighted_means"}),
    a2c: ("policy gradients with whitened advantages", {"not_a_weighted_sum"}),
    chunked_batch: ("loops that chunk() a batch", {"constant_divisor"}),
    graph_of_the_last: ("loops that detach running losses", {"samples_missing"}),
    distillation_accumulated: ("distillation loops", {"constant_divisor", "mean_of_means"}),
    recurrent_not_divided: ("recurrent language models", {"not_divided", "mean_of_means"}),
    no_sync_the_wrong_way_round: ("DDP loops", {"not_reduced"}),
    masked_language_model: ("BERT pre-training loops", {"mean_of_token_means"}),
    labelled_means: ("loops with a mask of labelled samples", {"mean_of_weighted_means"}),
}
"""Loop -> its source, and the findings that a person needs; the first ten are right."""
