"""What other libraries call things: their option, ours, and what differs. Data, so that the list can be read.

The names are those of DeepSpeed (configuration JSON), Accelerate (`accelerate launch`), transformers
(`TrainingArguments`), Lightning (`Trainer`), Megatron-LM, torchtitan, torchrun and nanoGPT.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

OWN_WORDS = (
    "effective-batch-size",
    "micro-batch-size",
    "accumulation-steps",
    "ranks",
    "epochs",
    "steps",
    "learning-rate",
    "base-batch-size",
    "learning-rate-rule",
    "precision",
    "seed",
    "out",
    "resume",
)


@dataclass(frozen=True, slots=True)
class ForeignWord:
    """One idea under the names that others have for it.

    Attributes:
        names: options of other libraries, without dashes in front, with dashes between words.
        ours: what to type here.
        difference: what the number means there and here; "the same" where it means the same.
    """

    names: tuple[str, ...]
    ours: str
    difference: str


_IN_THE_RECIPE = "a recipe says this once, for every machine"

FOREIGN_WORDS = (
    ForeignWord(
        ("global-batch-size", "train-batch-size", "training.global-batch-size", "total-batch-size"),
        "--effective-batch-size N",
        "the same: samples of one optimizer step over all ranks. "
        "(A train-batch-size per device is another number: times ranks and accumulation steps, it is this one.)",
    ),
    ForeignWord(
        (
            *("per-device-train-batch-size", "per-gpu-train-batch-size", "train-micro-batch-size-per-gpu"),
            *("training.local-batch-size", "local-batch-size", "device-batch-size", "micro-batch", "mbs"),
        ),
        "--micro-batch-size N",
        "the same number, samples of one forward and backward on one device; but it only has to fit the memory. It no "
        "longer decides the batch: name that with --effective-batch-size (theirs x accumulation steps x ranks).",
    ),
    ForeignWord(
        ("batch-size", "bs", "b", "training.batch-size", "data.batch-size"),
        "--effective-batch-size N",
        "a batch size per what? Elsewhere it is mostly per device and micro-batch. Here you name the samples of one "
        "optimizer step over all ranks: theirs x accumulation steps x ranks.",
    ),
    ForeignWord(
        (
            *("gradient-accumulation-steps", "gradient-accumulation", "grad-accum", "grad-accum-steps", "grad-acc"),
            *("accumulate-grad-batches", "trainer.accumulate-grad-batches", "accum-steps", "accum-iter", "update-freq"),
        ),
        "--accumulation-steps N",
        "micro-batches per rank and step, as there; but it no longer makes the batch larger, it cuts the same "
        "effective batch into more parts. Mostly you need not name it: it follows from --effective-batch-size, "
        "--micro-batch-size and --ranks. (nanoGPT's counts over all ranks.)",
    ),
    ForeignWord(
        ("auto-find-batch-size", "auto-scale-batch-size"),
        "--micro-batch-size auto",
        "finds what fits the memory, and unlike theirs leaves the effective batch as it is.",
    ),
    ForeignWord(
        ("rampup-batch-size",),
        "--effective-batch-size N --resume",
        "a batch that grows is a run that is resumed with a larger effective batch.",
    ),
    ForeignWord(
        (
            *("num-processes", "nproc-per-node", "nproc", "n-proc", "devices", "trainer.devices", "gpus", "num-gpus"),
            *("ngpu", "world-size", "n-gpu", "trainer.gpus", "multi-gpu", "num-devices"),
        ),
        "--ranks N",
        "the same: processes on this machine. The result does not depend on it.",
    ),
    ForeignWord(
        ("num-nodes", "nnodes", "num-machines", "master-addr", "master-port", "rdzv-endpoint", "node-rank"),
        "torchrun ... -m anybatch train",
        "`--ranks` starts processes on this machine only. Started by torchrun on each node, anybatch joins what is "
        "there: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:PORT -m anybatch train RECIPE.",
    ),
    ForeignWord(
        ("num-train-epochs", "max-epochs", "trainer.max-epochs", "num-epochs", "n-epochs"),
        "--epochs N",
        "the same, in whole epochs.",
    ),
    ForeignWord(
        (
            *("max-steps", "trainer.max-steps", "train-iters", "training.steps", "max-iters", "num-steps"),
            *("max-train-steps", "iterations", "num-iterations", "total-steps"),
        ),
        "--steps N",
        "optimizer steps, each on one effective batch; not micro-batches.",
    ),
    ForeignWord(
        ("lr", "optimizer.lr", "max-lr", "peak-lr"),
        "--learning-rate X",
        "the rate found at --base-batch-size; it is carried to the effective batch size by --learning-rate-rule, and "
        "what comes of it is printed. With the recipe's own batch size it is taken as it is.",
    ),
    ForeignWord(
        ("scale-lr", "lr-scaling", "linear-scaling", "auto-lr", "lr-scaling-rule"),
        "--learning-rate-rule linear",
        "one of linear, sqrt and none, from --base-batch-size to --effective-batch-size.",
    ),
    ForeignWord(
        (
            *("fp16", "half", "amp", "use-amp", "trainer.precision", "mixed-precision", "bf16", "dtype"),
            *("training.mixed-precision-param", "compute-dtype", "torch-dtype"),
        ),
        "--precision bf16",
        "one of fp32, bf16 and fp16: the number format of forward and backward; parameters stay as they are. "
        "fp16 scales the loss by itself.",
    ),
    ForeignWord(
        (
            *("output-dir", "out-dir", "save", "save-dir", "save-path", "default-root-dir", "project-dir", "logdir"),
            *("log-dir", "logging-dir"),
        ),
        "--out FOLDER",
        "the same: one run's log and checkpoints.",
    ),
    ForeignWord(
        (
            *("resume-from-checkpoint", "resume-from", "ckpt-path", "load", "init-from", "checkpoint", "restore"),
            *("load-checkpoint", "checkpoint.folder", "load-dir", "auto-resume"),
        ),
        "--resume --out FOLDER",
        "names the run's folder, not a checkpoint: the newest intact one in it is taken.",
    ),
    ForeignWord(
        ("random-seed", "manual-seed", "data-seed", "rng-seed", "seed-everything"),
        "--seed N",
        "one seed for parameters, order, augmentation and dropout.",
    ),
    ForeignWord(
        (
            *("max-grad-norm", "clip-grad", "gradient-clip-val", "clip-grad-norm", "grad-clip", "gradient-clipping"),
            *("weight-decay", "wd", "optim", "optimizer", "momentum", "adam-beta1", "adam-beta2", "adam-epsilon"),
            *("warmup-steps", "warmup-ratio", "lr-scheduler-type", "lr-decay-style", "lr-warmup-iters", "scheduler"),
            *("model", "model-name-or-path", "dataset", "data-path", "data", "loss"),
        ),
        "Job(clip=, optimizer=, scheduler=, model=, dataset=)",
        f"{_IN_THE_RECIPE}; `anybatch init train.py` writes one to change.",
    ),
    ForeignWord(
        ("use-distributed-optimizer", "zero-stage", "fsdp", "strategy", "trainer.strategy", "deepspeed", "ddp"),
        "ab.Engine(strategy=)",
        "the command line takes the strategy that fits: one rank is `single`, several are `all_reduce`.",
    ),
)


def explain_unknown(words: Sequence[str]) -> str:
    """Return what to say about options that do not exist, the first one that others have before all else."""
    names = [plain(word) for word in words if word.startswith("-")]
    for name in names:
        for foreign in FOREIGN_WORDS:
            if name in foreign.names:
                return f"there is no --{name}; here it is `{foreign.ours}`: {foreign.difference}"
    if not names:
        return f"what is {' '.join(words)!r}? One recipe is run at a time, and options begin with --"
    near = difflib.get_close_matches(names[0], OWN_WORDS, n=1)
    hint = f"Did you mean --{near[0]}?" if near else f"There are: {', '.join(f'--{word}' for word in OWN_WORDS)}."
    return f"there is no --{names[0]}. {hint}"


def plain(option: str) -> str:
    """Return an option's name the way the table has it: `--Max_Steps=3` is `max-steps`."""
    return option.lstrip("-").partition("=")[0].replace("_", "-").casefold()
