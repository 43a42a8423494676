"""Maps options of other libraries to ours; docs/command_line.md has the same table, with the differences.

The names come from DeepSpeed (configuration JSON), Accelerate (`accelerate launch`), transformers
(`TrainingArguments`), Lightning (`Trainer`), Megatron-LM, torchtitan, torchrun and nanoGPT.
"""

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Final

from anybatch.core.run_config import RunConfig

OWN_OPTIONS: Final = (
    *(field.name.replace("_", "-") for field in dataclasses.fields(RunConfig)),
    *("ranks", "out", "resume", "checkpoint-seconds"),
)

# The hint explains the difference if the same number gives a different batch here.
_EFFECTIVE = (
    "samples of one optimizer step over all ranks. Multiply a batch size per device by the accumulation steps and "
    "the ranks."
)
_MICRO = (
    "samples per forward and backward on one device, the same number. It only has to fit into memory and does not "
    "determine the batch: set that with --effective-batch-size (theirs x accumulation steps x ranks)."
)
_STEPS = (
    "micro-batches per rank and step. They do not enlarge the batch; they split the same effective batch into more "
    "parts. Usually you can leave them out."
)
_RECIPE = "belongs to the recipe, for every machine; `anybatch init train.py` writes one to edit."

HINTS: Final = (
    (
        "--effective-batch-size N",
        """global-batch-size train-batch-size training.global-batch-size total-batch-size batch-size bs b
        training.batch-size data.batch-size""",
        _EFFECTIVE,
    ),
    (
        "--micro-batch-size N",
        """per-device-train-batch-size per-gpu-train-batch-size train-micro-batch-size-per-gpu training.local-batch-size
        local-batch-size device-batch-size micro-batch mbs""",
        _MICRO,
    ),
    (
        "--accumulation-steps N",
        """gradient-accumulation-steps gradient-accumulation grad-accum grad-accum-steps grad-acc accum-steps accum-iter
        accumulate-grad-batches trainer.accumulate-grad-batches update-freq""",
        _STEPS,
    ),
    ("--micro-batch-size auto", "auto-find-batch-size auto-scale-batch-size", ""),
    (
        "--effective-batch-size 32,128@20000",
        "rampup-batch-size",
        "32 samples per optimizer step, and 128 after 20,000 samples; Megatron-LM adds a fixed increment repeatedly.",
    ),
    (
        "--ranks N",
        """num-processes nproc-per-node nproc n-proc devices trainer.devices gpus num-gpus ngpu world-size n-gpu
        trainer.gpus multi-gpu num-devices""",
        "",
    ),
    (
        "torchrun ... -m anybatch train",
        "num-nodes nnodes num-machines master-addr master-port rdzv-endpoint node-rank",
        "",
    ),
    ("--epochs N", "num-train-epochs max-epochs trainer.max-epochs num-epochs n-epochs", ""),
    (
        "--steps N",
        """max-steps trainer.max-steps train-iters training.steps max-iters num-steps max-train-steps iterations
        num-iterations total-steps""",
        "",
    ),
    ("--learning-rate X", "lr optimizer.lr max-lr peak-lr", ""),
    ("--learning-rate-rule linear", "scale-lr lr-scaling linear-scaling auto-lr lr-scaling-rule", ""),
    (
        "--precision bf16",
        """fp16 half amp use-amp trainer.precision mixed-precision bf16 dtype training.mixed-precision-param
        compute-dtype torch-dtype""",
        "",
    ),
    (
        "--out FOLDER",
        "output-dir out-dir save save-dir save-path default-root-dir project-dir logdir log-dir logging-dir",
        "",
    ),
    (
        "--resume --out FOLDER",
        """resume-from-checkpoint resume-from ckpt-path load init-from checkpoint restore load-checkpoint
        checkpoint.folder load-dir""",
        "",
    ),
    ("--resume auto --out FOLDER", "auto-resume autoresume requeue", ""),
    (
        "--checkpoint-seconds X",
        """save-steps save-interval checkpointing-steps checkpoint.interval every-n-train-steps save-freq
        checkpoint-interval save-every""",
        "",
    ),
    ("--seed N", "random-seed manual-seed data-seed rng-seed seed-everything", ""),
    (
        "Job(clip=, optimizer=, scheduler=, model=, dataset=)",
        """max-grad-norm clip-grad gradient-clip-val clip-grad-norm grad-clip gradient-clipping weight-decay wd optim
        optimizer momentum adam-beta1 adam-beta2 adam-epsilon warmup-steps warmup-ratio lr-scheduler-type
        lr-decay-style lr-warmup-iters scheduler model model-name-or-path dataset data-path data loss""",
        _RECIPE,
    ),
    (
        "--strategy NAME",
        "use-distributed-optimizer zero-stage fsdp trainer.strategy deepspeed ddp",
        "",
    ),
)
"""Our option, its names in other libraries, and the difference if the same number means something else."""


def explain_unknown(words: Sequence[str]) -> str:
    """Return an error about unknown options: our name for another library's option, else the most similar one."""
    names = [plain(word) for word in words if word.startswith("-")]
    for name in names:
        for ours, theirs, difference in HINTS:
            if name in theirs.split():
                found = f"unknown option --{name}; here it is `{ours}`"
                return f"{found}: {difference}" if difference else f"{found}."
    if not names:
        return f"unknown argument {words[0]!r}. Pass one recipe; options begin with --"
    near = difflib.get_close_matches(names[0], OWN_OPTIONS, n=1)
    hint = f"Did you mean --{near[0]}?" if near else f"Options: {', '.join(f'--{word}' for word in OWN_OPTIONS)}."
    return f"unknown option --{names[0]}. {hint}"


def plain(option: str) -> str:
    """Return an option's name in the form of the table: `max-steps` for `--Max_Steps=3`."""
    return option.lstrip("-").partition("=")[0].replace("_", "-").casefold()
