"""Training loops from public repositories, rewritten in a few lines each, with their expected findings.

The arithmetic, the placement of step and zero_grad and the calls match the repository; the lines are ours. The
expected findings were derived by hand: for the last, smaller micro-batch and the last, shorter window of an epoch, and
for samples with different numbers of targets.
"""
# The loops look like users' code, so some rules for ours do not apply:
# ruff: noqa: ANN001, ANN003, ANN201, ANN202, ANN204, ARG001, B023, D103, N806, N817, PLR0917, PLW2901, PTH102, PTH112
# ruff: noqa: B905, PTH123, RUF059, SIM113, T201
# mypy: ignore-errors

import itertools
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

# Language models


def nano_gpt(model, get_batch, optimizer, scaler, gradient_accumulation_steps, max_iters, grad_clip):
    X, Y = get_batch("train")
    for _ in range(max_iters):
        for _micro_step in range(gradient_accumulation_steps):
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
            X, Y = get_batch("train")
            scaler.scale(loss).backward()
        if grad_clip != 0.0:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


def build_nanogpt(model, train_loader, optimizer, grad_accum_steps, max_steps):
    device = "cuda"
    for step in range(max_steps):
        t0 = time.time()
        model.train()
        optimizer.zero_grad()
        loss_accum = 0.0
        for _ in range(grad_accum_steps):
            x, y = train_loader.next_batch()
            x, y = x.to(device), y.to(device)
            with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
                logits, loss = model(x, y)
            loss = loss / grad_accum_steps
            loss_accum += loss.detach()
            loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        optimizer.step()
        torch.cuda.synchronize()
        print(step, loss_accum.item(), norm, time.time() - t0)


class MinGptTrainer:
    def __init__(self, config, model, train_dataset):
        self.config, self.model, self.train_dataset = config, model, train_dataset
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = self.model.to(self.device)

    def run(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate)
        loader = DataLoader(self.train_dataset, shuffle=True, batch_size=self.config.batch_size)
        for _ in range(self.config.max_epochs):
            for batch in loader:
                x, y = [t.to(self.device) for t in batch]
                logits, self.loss = self.model(x, y)
                self.model.zero_grad(set_to_none=True)
                self.loss.backward()
                clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip or 1.0)
                optimizer.step()


def min_gpt(config, model, train_dataset):
    MinGptTrainer(config, model, train_dataset).run()


def modded_nanogpt(model, train_loader, optimizers, accumulation_steps, max_steps):
    for _ in range(max_steps):
        for _i in range(accumulation_steps):
            inputs, targets = train_loader.next_batch()
            loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
            loss.backward()
        for p in model.parameters():
            p.grad /= accumulation_steps
        for opt in optimizers:
            opt.step()
        model.zero_grad(set_to_none=True)


def modded_nanogpt_one(model, train_loader, optimizer, accumulation_steps, max_steps):
    modded_nanogpt(model, train_loader, [optimizer], accumulation_steps, max_steps)


def x_transformers(model, train_loader, optim, max_steps):
    GRADIENT_ACCUMULATE_EVERY = 3
    train_loader = itertools.cycle(train_loader)
    for _ in range(max_steps):
        model.train()
        for _i in range(GRADIENT_ACCUMULATE_EVERY):
            loss = model(next(train_loader))
            (loss / GRADIENT_ACCUMULATE_EVERY).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optim.step()
        optim.zero_grad()


def glue_no_trainer(args, model, train_dataloader, optimizer, lr_scheduler):
    completed_steps = 0
    for _ in range(args.num_train_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            outputs = model(**batch)
            loss = outputs.loss
            loss = loss / args.gradient_accumulation_steps
            loss.backward()
            if step % args.gradient_accumulation_steps == 0 or step == len(train_dataloader) - 1:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                completed_steps += 1


def run_lm_legacy(args, model, train_dataloader, optimizer, scheduler):
    tr_loss, global_step = 0.0, 0
    model.zero_grad()
    for _ in range(int(args.num_train_epochs)):
        for step, batch in enumerate(train_dataloader):
            inputs, labels = (one.to(args.device) for one in batch)
            outputs = model(inputs, labels=labels)
            loss = outputs[0]
            if args.gradient_accumulation_steps > 1:
                loss = loss / args.gradient_accumulation_steps
            loss.backward()
            tr_loss += loss.item()
            if (step + 1) % args.gradient_accumulation_steps == 0:
                clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                model.zero_grad()
                global_step += 1
    return global_step, tr_loss / global_step


def litgpt(model, train_dataloader, optimizer, accumulation_steps, max_iters):
    iter_num = 0
    endless = (batch for _ in itertools.count() for batch in train_dataloader)
    for batch in endless:
        if iter_num >= max_iters * accumulation_steps:
            break
        iter_num += 1
        is_accumulating = iter_num % accumulation_steps != 0
        logits = model(batch["input_ids"])
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), batch["labels"].reshape(-1), ignore_index=-100)
        (loss / accumulation_steps).backward()
        if not is_accumulating:
            optimizer.step()
            optimizer.zero_grad()


def token_loop_by_samples(model, loader, optimizer, accumulation_steps, epochs):
    for _ in range(epochs):
        batches = iter(loader)
        while window := list(itertools.islice(batches, accumulation_steps)):
            total = sum(len(batch["labels"]) for batch in window)
            for batch in window:
                logits = model(batch["input_ids"])
                loss = F.cross_entropy(logits.view(-1, logits.size(-1)), batch["labels"].view(-1), ignore_index=-100)
                (loss * len(batch["labels"]) / total).backward()
            optimizer.step()
            optimizer.zero_grad()


# Translation and speech


class FairseqTrainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def train_step(self, samples):
        self.model.train()
        self.optimizer.zero_grad()
        sample_size = 0
        for sample in samples:
            net_output = self.model(sample["input_ids"])
            target = sample["target"]
            lprobs = F.log_softmax(net_output, dim=-1)
            lprobs, target = lprobs.reshape(-1, lprobs.size(-1)), target.reshape(-1)
            loss = F.nll_loss(lprobs, target, ignore_index=-100, reduction="sum")
            loss.backward()
            sample_size += int((target != -100).sum())
        for p in self.model.parameters():
            p.grad.mul_(1.0 / sample_size)
        clip_grad_norm_(self.model.parameters(), 25.0)
        self.optimizer.step()


def fairseq(model, loader, optimizer, update_freq, max_epoch):
    trainer = FairseqTrainer(model, optimizer)
    for _ in range(max_epoch):
        batches = iter(loader)
        while chunk := list(itertools.islice(batches, update_freq)):
            trainer.train_step(chunk)


def opennmt(model, train_iter, optim, accumulation_steps, epochs):
    for _ in range(epochs):
        batches, normalization = [], 0
        for number, batch in enumerate(train_iter, start=1):
            batches.append(batch)
            normalization += int(batch["tgt"].ne(-100).sum())
            if len(batches) == accumulation_steps or number == len(train_iter):
                optim.zero_grad()
                for one in batches:
                    out = model(one["src"])
                    loss = F.cross_entropy(out.flatten(0, -2), one["tgt"].flatten(), reduction="sum", ignore_index=-100)
                    loss.div(normalization).backward()
                optim.step()
                batches, normalization = [], 0


def wenet(model, data_loader, optimizer, scheduler, accum_grad, grad_clip, epoch):
    for batch_idx, batch in enumerate(data_loader):
        feats, target = batch
        loss = F.cross_entropy(model(feats), target) / accum_grad
        loss.backward()
        if batch_idx % accum_grad == 0:
            grad_norm = clip_grad_norm_(model.parameters(), grad_clip)
            if torch.isfinite(grad_norm):
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()


def espnet(model, loader, optimizer, accum_grad, max_epoch):
    for _ in range(max_epoch):
        model.train()
        for iiter, (x, y) in enumerate(loader, 1):
            loss = F.cross_entropy(model(x), y)
            loss = loss / accum_grad
            loss.backward()
            if iiter % accum_grad == 0:
                grad_norm = clip_grad_norm_(model.parameters(), max_norm=5.0)
                if torch.isfinite(torch.as_tensor(grad_norm)):
                    optimizer.step()
                optimizer.zero_grad()


class SpeechbrainBrain:
    def __init__(self, model, optimizer, grad_accumulation_steps):
        self.model, self.optimizer, self.factor, self.step = model, optimizer, grad_accumulation_steps, 0

    def fit_batch(self, batch):
        should_step = self.step % self.factor == 0
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        (loss / self.factor).backward()
        if should_step:
            clip_grad_norm_(self.model.parameters(), 5.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def fit(self, epochs, train_loader):
        for _ in range(epochs):
            for batch in train_loader:
                self.step += 1
                self.fit_batch(batch)


def speechbrain(model, optimizer, grad_accumulation_steps, epochs, train_loader):
    SpeechbrainBrain(model, optimizer, grad_accumulation_steps).fit(epochs, train_loader)


def tacotron2(hparams, model, train_loader, optimizer, criterion):
    for epoch in range(hparams.epochs):
        for iteration, batch in enumerate(train_loader):
            model.zero_grad()
            x, y = batch
            y_pred = model(x)
            loss = criterion(y_pred, y)
            reduced_loss = loss.item()
            loss.backward()
            clip_grad_norm_(model.parameters(), hparams.grad_clip_thresh or 1.0)
            optimizer.step()
            if not math.isnan(reduced_loss) and iteration and iteration % hparams.iters_per_checkpoint == 0:
                torch.save({"state": model.state_dict(), "epoch": epoch}, Path(hparams.output_directory, "checkpoint"))


def bentrevett_seq2seq(model, data_loader, optimizer, criterion, clip, device, teacher_forcing_ratio=0.5):
    model.train()
    epoch_loss = 0
    for _i, batch in enumerate(data_loader):
        src, trg = batch["src"].to(device), batch["trg"]
        trg = batch["tgt"].to(device)
        optimizer.zero_grad()
        output = model(src)
        output_dim = output.shape[-1]
        loss = F.cross_entropy(output.reshape(-1, output_dim), trg.reshape(-1), ignore_index=-100)
        loss.backward()
        clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        epoch_loss += loss.item()
    return epoch_loss / len(data_loader)


# Images


def mnist_example(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = F.log_softmax(model(data), dim=1)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"epoch {epoch}: {batch_idx * len(data)}/{len(train_loader.dataset)} {loss.item():.6f}")
            if args.dry_run:
                break


def imagenet_example(train_loader, model, criterion, optimizer, epoch, device, args):
    model.train()
    end, meters = time.time(), []
    for i, (images, target) in enumerate(train_loader):
        images = images.cuda(args.gpu, non_blocking=True)
        target = target.cuda(args.gpu, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        correct = output.topk(1, 1)[1].t().eq(target.view(1, -1)).float().sum()
        meters.append((loss.item(), correct.item(), time.time() - end))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % args.print_freq == 0:
            print(meters[-1])


def pytorch_cifar(net, trainloader, optimizer, criterion):
    device = "cuda"
    net = net.to(device)
    best_acc = 0
    for epoch in range(200):
        net.train()
        correct = total = 0
        for inputs, targets in trainloader:
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            outputs = net(inputs)
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()
            _, predicted = outputs.max(1)
            total += targets.size(0)
            correct += predicted.eq(targets).sum().item()
        if 100.0 * correct / total > best_acc or epoch == 0:
            if not os.path.isdir("checkpoint"):
                os.mkdir("checkpoint")
            torch.save({"net": net.state_dict(), "epoch": epoch}, "./checkpoint/ckpt.pth")
            best_acc = 100.0 * correct / total


def timm_one_epoch(epoch, model, loader, optimizer, loss_fn, args, device, lr_scheduler=None, loss_scaler=None):
    accum_steps = args.grad_accum_steps
    last_accum_steps = len(loader) % accum_steps
    updates_per_epoch = (len(loader) + accum_steps - 1) // accum_steps
    num_updates = epoch * updates_per_epoch
    last_batch_idx = len(loader) - 1
    last_batch_idx_to_accum = len(loader) - last_accum_steps
    model.train()
    optimizer.zero_grad()
    for batch_idx, (inputs, target) in enumerate(loader):
        last_batch = batch_idx == last_batch_idx
        need_update = last_batch or (batch_idx + 1) % accum_steps == 0
        if batch_idx >= last_batch_idx_to_accum:
            accum_steps = last_accum_steps
        inputs, target = inputs.to(device), target.to(device)
        loss = loss_fn(model(inputs), target)
        if accum_steps > 1:
            loss /= accum_steps
        loss.backward()
        if not need_update:
            continue
        if args.clip_grad is not None:
            clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        num_updates += 1
        optimizer.zero_grad()


class NativeScaler:
    def __init__(self):
        self._scaler = torch.cuda.amp.GradScaler()

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, update_grad=True):
        self._scaler.scale(loss).backward()
        if update_grad:
            self._scaler.unscale_(optimizer)
            if clip_grad is not None:
                clip_grad_norm_(parameters, clip_grad)
            self._scaler.step(optimizer)
            self._scaler.update()


def mae_one_epoch(model, data_loader, optimizer, device, epoch, args):
    model.train(True)
    loss_scaler = NativeScaler()
    accum_iter = args.accum_iter
    optimizer.zero_grad()
    for data_iter_step, (samples, targets) in enumerate(data_loader):
        samples, targets = samples.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with torch.cuda.amp.autocast():
            loss = F.cross_entropy(model(samples), targets)
        loss /= accum_iter
        update = (data_iter_step + 1) % accum_iter == 0
        loss_scaler(loss, optimizer, parameters=model.parameters(), update_grad=update)
        if update:
            optimizer.zero_grad()
        torch.cuda.synchronize()


def deit_one_epoch(model, criterion, data_loader, optimizer, device, epoch, max_norm, mixup_fn=None):
    loss_scaler = NativeScaler()
    for samples, targets in data_loader:
        samples, targets = samples.to(device), targets.to(device)
        if mixup_fn is not None:
            samples, targets = mixup_fn(samples, targets)
        with torch.cuda.amp.autocast():
            loss = criterion(model(samples), targets)
        if not math.isfinite(loss.item()):
            raise SystemExit(1)
        optimizer.zero_grad()
        loss_scaler(loss, optimizer, clip_grad=max_norm, parameters=model.parameters())


def convnext_one_epoch(model, criterion, data_loader, optimizer, device, update_freq, epoch):
    model.train(True)
    optimizer.zero_grad()
    for data_iter_step, (samples, targets) in enumerate(data_loader):
        step = data_iter_step // update_freq
        if step >= len(data_loader) // update_freq:
            continue
        loss = criterion(model(samples.to(device)), targets.to(device))
        loss /= update_freq
        loss.backward()
        if (data_iter_step + 1) % update_freq == 0:
            optimizer.step()
            optimizer.zero_grad()


def yolov5(model, train_loader, optimizer, epochs, batch_size):
    nbs, nb, last_opt_step = 12, len(train_loader), -1
    accumulate = max(round(nbs / batch_size), 1)
    scaler = torch.cuda.amp.GradScaler(enabled=True)
    for epoch in range(epochs):
        model.train()
        optimizer.zero_grad()
        for i, (imgs, targets) in enumerate(train_loader):
            ni = i + nb * epoch
            pred = model(imgs)
            loss = F.cross_entropy(pred, targets) * len(imgs)
            scaler.scale(loss).backward()
            if ni - last_opt_step >= accumulate:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), max_norm=10.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                last_opt_step = ni


def unet(model, train_loader, optimizer, device, epochs, gradient_clipping=1.0):
    grad_scaler = torch.cuda.amp.GradScaler(enabled=True)
    criterion = nn.BCEWithLogitsLoss()
    for epoch in range(1, epochs + 1):
        for batch in train_loader:
            images, true_masks = batch["image"].to(device), batch["target"].to(device)
            with torch.autocast("cuda", enabled=True):
                masks_pred = model(images)
                probs = torch.sigmoid(masks_pred)
                loss = criterion(masks_pred, true_masks)
                loss += 1 - (2 * (probs * true_masks).sum() + 1e-6) / (probs.sum() + true_masks.sum() + 1e-6)
            optimizer.zero_grad(set_to_none=True)
            grad_scaler.scale(loss).backward()
            grad_scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), gradient_clipping)
            grad_scaler.step(optimizer)
            grad_scaler.update()
        Path("checkpoints").mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), str(Path("checkpoints") / f"checkpoint_epoch{epoch}.pth"))


def dice_accumulated(model, loader, optimizer, accumulation_steps, epochs):
    for _ in range(epochs):
        batches = iter(loader)
        while window := list(itertools.islice(batches, accumulation_steps)):
            for x, y in window:
                p = torch.sigmoid(model(x))
                loss = 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)
                (loss / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()


def smp_epoch(model, dataloader, optimizer, loss_func, device):
    model.train()
    logs = []
    for x, y in dataloader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        prediction = model.forward(x)
        loss = loss_func(prediction, y)
        loss.backward()
        optimizer.step()
        logs.append(loss.cpu().detach().numpy())


def detr_one_epoch(model, criterion, data_loader, optimizer, device, epoch, max_norm=0):
    model.train()
    for samples, targets in data_loader:
        outputs = model(samples.to(device))
        loss_dict = {"loss_ce": criterion(outputs, targets.to(device)), "loss_bbox": outputs.square().mean()}
        weight_dict = {"loss_ce": 1.0, "loss_bbox": 5.0}
        losses = sum(loss_dict[k] * weight_dict[k] for k in loss_dict if k in weight_dict)
        optimizer.zero_grad()
        losses.backward()
        if max_norm > 0:
            clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()


def mmcv_cumulative(model, data_loader, optimizer, accumulation_steps, max_epochs):
    max_iters = max_epochs * len(data_loader)
    divisible = max_iters // accumulation_steps * accumulation_steps
    remainder, it = max_iters - divisible, 0
    for _ in range(max_epochs):
        for x, y in data_loader:
            loss_factor = accumulation_steps if it < divisible else remainder
            (F.cross_entropy(model(x), y) / loss_factor).backward()
            if (it + 1) % accumulation_steps == 0 or it + 1 == max_iters:
                optimizer.step()
                optimizer.zero_grad()
            it += 1


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * group["rho"] / (p.grad.norm() + 1e-12))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()


def sam_example(model, train_loader, epochs):
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for inputs, targets in train_loader:
            loss = F.cross_entropy(model(inputs), targets, label_smoothing=0.1)
            loss.mean().backward()
            optimizer.first_step(zero_grad=True)
            F.cross_entropy(model(inputs), targets, label_smoothing=0.1).mean().backward()
            optimizer.second_step(zero_grad=True)


def cifar_mixup(model, loader, optimizer, device, alpha=1.0):
    for x, y in loader:
        lam = float(torch.distributions.Beta(alpha, alpha).sample())
        index = torch.randperm(len(x))
        mixed = lam * x + (1 - lam) * x[index]
        outputs = model(mixed)
        loss = lam * F.cross_entropy(outputs, y) + (1 - lam) * F.cross_entropy(outputs, y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Graphs, contrastive learning, physics, consistency


def pyg_gin(model, loader, optimizer, device):
    model.train()
    total_loss = 0
    for data in loader:
        data = data.to(device)
        optimizer.zero_grad()
        out = model(data.x, data.edge_index, data.batch)
        loss = F.cross_entropy(out, data.y)
        loss.backward()
        total_loss += float(loss) * data.num_graphs
        optimizer.step()
    return total_loss / len(loader.dataset)


def open_clip_small_batches(model, dataloader, optimizer, accumulation_steps, epochs):
    for _ in range(epochs):
        for i, (images, texts) in enumerate(dataloader):
            features = F.normalize(model(images), dim=-1)
            others = F.normalize(texts.double()[:, None] + features.detach(), dim=-1)
            logits = 10.0 * features @ others.T
            loss = F.cross_entropy(logits, torch.arange(len(logits)))
            (loss / accumulation_steps).backward()
            if (i + 1) % accumulation_steps == 0 or i + 1 == len(dataloader):
                optimizer.step()
                optimizer.zero_grad()


def lbfgs_example(model, loader, epochs):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8)
    for _ in range(epochs):
        for inputs, target in loader:

            def closure():
                optimizer.zero_grad()
                loss = F.mse_loss(model(inputs), target)
                loss.backward()
                return loss

            optimizer.step(closure)


def pinn_by_grad(model, loader, optimizer, accumulation_steps, epochs):
    for _ in range(epochs):
        batches = iter(loader)
        while window := list(itertools.islice(batches, accumulation_steps)):
            total, sums = sum(len(y) for _, y in window), None
            for x, y in window:
                loss = F.mse_loss(model(x), y, reduction="sum") / (total * y.shape[1])
                grads = torch.autograd.grad(loss, tuple(model.parameters()))
                sums = grads if sums is None else tuple(a + b for a, b in zip(sums, grads))
            for p, g in zip(model.parameters(), sums):
                p.grad = g
            optimizer.step()


def maml_like_clearing(model, loader, optimizer, accumulation_steps, epochs):
    for _ in range(epochs):
        batches = iter(loader)
        while window := list(itertools.islice(batches, accumulation_steps)):
            for x, y in window:
                grads = torch.autograd.grad(F.cross_entropy(model(x), y), tuple(model.parameters()))
                for p, g in zip(model.parameters(), grads):
                    p.grad = g / len(window)
            optimizer.step()


def r_drop(model, loader, optimizer):
    for x, y in loader:
        one, other = model(x), model(x)
        ce = 0.5 * (F.cross_entropy(one, y) + F.cross_entropy(other, y))
        kl = F.kl_div(one.log_softmax(-1), other.softmax(-1), reduction="batchmean")
        loss = ce + 4.0 * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Common published faults


def clip_before_unscale(model, train_loader, optimizer, scaler, accumulation_steps, epochs):
    for _ in range(epochs):
        batches = iter(train_loader)
        while window := list(itertools.islice(batches, accumulation_steps)):
            total = sum(len(y) for _, y in window)
            for x, y in window:
                loss = F.cross_entropy(model(x), y) * len(y) / total
                scaler.scale(loss).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def step_without_scaler(model, train_loader, optimizer):
    scaler = torch.cuda.amp.GradScaler()
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def weighted_classes(model, train_loader, optimizer, accumulation_steps, epochs):
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 2.0, 1.0, 0.5, 3.0], dtype=torch.float64))
    for _ in range(epochs):
        for i, (x, y) in enumerate(train_loader):
            loss = criterion(model(x), y.long())
            if y.is_floating_point():
                raise TypeError(y.dtype)
            left = len(train_loader) % accumulation_steps
            in_tail = i >= len(train_loader) - left
            (loss / (left if in_tail else accumulation_steps)).backward()
            if (i + 1) % accumulation_steps == 0 or i + 1 == len(train_loader):
                optimizer.step()
                optimizer.zero_grad()


def tutorial_loop(model, data_loader, optimizer, criterion, accumulation_steps, device):
    for batch_idx, (inputs, targets) in enumerate(data_loader):
        preds = model(inputs.to(device))
        loss = criterion(preds, targets.to(device))
        loss = loss / accumulation_steps
        loss.backward()
        if ((batch_idx + 1) % accumulation_steps == 0) or (batch_idx + 1 == len(data_loader)):
            optimizer.step()
            optimizer.zero_grad()


def zeroed_at_the_top(model, train_loader, optimizer, accumulation_steps, epochs):
    for _ in range(epochs):
        for i, (x, y) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) / accumulation_steps
            loss.backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()


def clip_outside_of_the_window(args, model, train_dataloader, optimizer, scheduler):
    for _ in range(args.num_train_epochs):
        for step, (x, y) in enumerate(train_dataloader):
            loss = F.cross_entropy(model(x), y) / args.gradient_accumulation_steps
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            if (step + 1) % args.gradient_accumulation_steps == 0 or (step + 1) == len(train_dataloader):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


def kaggle_best_model(model, train_loader, criterion, optimizer):
    best, history = math.inf, []
    for epoch in range(100):
        running = 0.0
        for inputs, labels in train_loader:
            inputs, labels = inputs.cuda(), labels.cuda()
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            running += loss.item() * inputs.size(0)
        history.append(running / len(train_loader.dataset))
        with open("history.csv", "a", encoding="utf-8") as file:
            file.write(f"{epoch},{history[-1]}\n")
        if history[-1] < best:
            best = history[-1]
            torch.save(model.state_dict(), "best.pt")


# Several ranks


def ddp_tutorial(model, train_data, optimizer, batch_size, max_epochs):
    dist.init_process_group(backend="nccl")
    gpu_id = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu_id)
    model = DDP(model.to(gpu_id) if torch.cuda.is_available() else model)
    loader = DataLoader(train_data, batch_size=batch_size, shuffle=False, sampler=DistributedSampler(train_data))
    for epoch in range(max_epochs):
        loader.sampler.set_epoch(epoch)
        for source, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(source.cuda()), targets.cuda())
            loss.backward()
            optimizer.step()
        if gpu_id == 0:
            torch.save(model.module.state_dict(), "checkpoint.pt")
    dist.destroy_process_group()


def ddp_every_micro_batch(model, train_loader, optimizer, accumulation_steps, world_size):
    dist.init_process_group("nccl", init_method="env://")
    model = DDP(model)
    batches = iter(train_loader)
    while window := list(itertools.islice(batches, accumulation_steps)):
        count = torch.tensor(float(sum(len(y) for _, y in window)))
        dist.all_reduce(count)
        for x, y in window:
            loss = F.cross_entropy(model(x.cuda()), y.cuda(), reduction="sum")
            (loss * dist.get_world_size() / count).backward()
        optimizer.step()
        optimizer.zero_grad()


PUBLISHED = {
    min_gpt: ("karpathy/minGPT", set()),
    speechbrain: ("speechbrain/speechbrain", {"tail_dropped"}),
    nano_gpt: ("karpathy/nanoGPT", set()),
    build_nanogpt: ("karpathy/build-nanogpt", set()),
    modded_nanogpt_one: ("KellerJordan/modded-nanogpt", set()),
    x_transformers: ("lucidrains/x-transformers", {"mean_of_token_means"}),
    glue_no_trainer: ("huggingface/transformers run_glue_no_trainer, before accelerate", {"window_size"}),
    run_lm_legacy: ("huggingface/transformers run_language_modeling, 2020", {"tail_carried", "mean_of_token_means"}),
    litgpt: ("Lightning-AI/litgpt", {"mean_of_token_means"}),
    token_loop_by_samples: ("loops for causal language models with padding", {"mean_of_token_means"}),
    fairseq: ("facebookresearch/fairseq", set()),
    opennmt: ("OpenNMT/OpenNMT-py", set()),
    wenet: ("wenet-e2e/wenet", {"window_size"}),
    espnet: ("espnet/espnet", {"tail_carried"}),
    tacotron2: ("NVIDIA/tacotron2", set()),
    bentrevett_seq2seq: ("bentrevett/pytorch-seq2seq", set()),
    mnist_example: ("pytorch/examples mnist", set()),
    imagenet_example: ("pytorch/examples imagenet", set()),
    pytorch_cifar: ("kuangliu/pytorch-cifar", set()),
    timm_one_epoch: ("huggingface/pytorch-image-models", {"mean_of_means"}),
    mae_one_epoch: ("facebookresearch/mae", {"tail_dropped"}),
    deit_one_epoch: ("facebookresearch/deit", set()),
    convnext_one_epoch: ("facebookresearch/ConvNeXt", {"samples_missing"}),
    yolov5: ("ultralytics/yolov5", {"tail_dropped"}),
    unet: ("milesial/Pytorch-UNet", set()),
    dice_accumulated: ("segmentation loops with batch dice", {"not_a_weighted_sum"}),
    smp_epoch: ("qubvel-org/segmentation_models.pytorch", set()),
    detr_one_epoch: ("facebookresearch/detr", set()),
    mmcv_cumulative: ("open-mmlab/mmcv", {"mean_of_means"}),
    sam_example: ("davda54/sam", set()),
    cifar_mixup: ("facebookresearch/mixup-cifar10", {"draws_random_numbers"}),
    pyg_gin: ("pyg-team/pytorch_geometric", set()),
    open_clip_small_batches: ("contrastive loops that accumulate", {"not_a_weighted_sum"}),
    lbfgs_example: ("pytorch/examples time_sequence_prediction", set()),
    pinn_by_grad: ("physics-informed loops", set()),
    maml_like_clearing: ("loops that set p.grad themselves", {"uneven_weights"}),
    r_drop: ("dropreg/R-Drop", set()),
    clip_before_unscale: ("loops with GradScaler", {"not_unscaled"}),
    step_without_scaler: ("loops with GradScaler", {"not_unscaled"}),
    weighted_classes: ("classification loops with class weights", {"mean_of_weighted_means"}),
    tutorial_loop: ("kobongsoo/GPUTech, and many tutorials", {"constant_divisor", "mean_of_means"}),
    zeroed_at_the_top: ("forum questions", {"zero_grad_inside_window"}),
    clip_outside_of_the_window: ("fine-tuning loops with args", {"clips_every_micro_batch", "constant_divisor"}),
    kaggle_best_model: ("notebooks of competitions", set()),
    ddp_tutorial: ("pytorch/examples distributed/ddp-tutorial-series", {"samples_duplicated"}),
    ddp_every_micro_batch: ("loops with DDP and no no_sync", set()),
}
"""Loop -> its source, and the findings about its gradients that must be among the reported ones."""
