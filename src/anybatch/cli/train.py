"""`anybatch train`: parse the options of a run, and report wrong ones before importing torch."""

import dataclasses
import difflib
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast

from anybatch.cli.command import (
    DEFAULT_RECIPE,
    RUNS,
    Parser,
    add_recipe,
    add_settings,
    count_or_auto,
    frozen_imports,
    let_threads_sleep,
    number,
    settings_of,
)
from anybatch.core.run_config import RunConfig
from anybatch.errors import UserError
from anybatch.parallel.launchers import start_fork_server

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


PRELOADED = ("anybatch.cli.local_ranks", "torch._dynamo")
"""Modules that the fork server of the ranks imports, so that a rank's first optimizer need not import torch._dynamo."""
Resume = Literal["always", "auto", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """A requested run.

    A value of None comes from the resumed run, else it is the default. `resume` is "always"; "auto": if the run was
    started in `folder`, and after out of memory; "never"; None: as "auto", but only if it is certainly this run: after
    out of memory, or when the launcher restarts these ranks.
    """

    recipe: str | None
    folder: Path | None
    resume: Resume | None
    ranks: int | Literal["auto"] | None
    checkpoint_seconds: float | None = None
    config: RunConfig


def short_name(recipe: str) -> str:
    """Return a short name for a recipe: `digits`, and `train` for `jobs/train.py:main` or `jobs.train:main`."""
    place, _, function = recipe.rpartition(":")
    # The colon of a Windows drive does not separate a function.
    place = place if place and function.isidentifier() else recipe
    return Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]


_DESCRIPTION = (
    "Train a recipe at a given effective batch size: the samples of one optimizer step, over all ranks. "
    "The split into micro-batches and ranks depends on the hardware and does not change the result."
)
_EPILOG = (
    "Exit status: 0 done, 1 an error in the recipe, 2 a wrong request, 3 stopped and saved, 4 loss or gradient not "
    "finite, 5 full disk or damaged checkpoint, 6 a rank failed, 7 out of memory."
)


def run(words: Sequence[str]) -> int:
    """Run `anybatch train` and return the exit status."""
    request = read(words)
    let_threads_sleep()
    # Before importing torch, so that the server and this process import it in parallel.
    if request.ranks not in (None, "auto", 1):
        start_fork_server(*PRELOADED)
    with frozen_imports():
        from anybatch.cli.launch import launch

    return launch(request)


def read(words: Sequence[str]) -> TrainRequest:
    """Return the request of a command line, or exit with the first error in it."""
    parser = make_parser()
    given = parser.parse(words)
    if given.resume in ("always", "auto") and given.out is None:
        newest = _newest_run() if given.resume == "always" else ""
        parser.error(f"--resume needs --out, the folder of the run to resume{newest}")
    try:
        config = settings_of(given)
    except UserError as error:
        parser.error(str(error))
    # The resumed run or the recipe provides missing options.
    return TrainRequest(
        recipe=given.recipe,
        folder=given.out,
        resume=given.resume,
        ranks=given.ranks,
        checkpoint_seconds=given.checkpoint_seconds,
        config=config,
    )


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("train", _DESCRIPTION, epilog=_EPILOG, explain_unknown=explain_unknown)
    add = parser.add_argument
    add_recipe(parser, None, DEFAULT_RECIPE)
    add_settings(add, *(field.name for field in dataclasses.fields(RunConfig)))
    add(
        "--ranks",
        type=count_or_auto,
        metavar="N",
        help="processes on this machine, or auto: one per accelerator, else one (default: auto)",
    )
    add("--out", type=Path, metavar="FOLDER", help=f"log and checkpoints (default: {RUNS}/RECIPE-DATE-TIME)")
    add(
        "--resume",
        type=when_to_resume,
        nargs="?",
        const="always",
        metavar="auto|never",
        help="resume the run in --out, keeping options that are not given; auto: resume if the run exists, else start "
        "it; never: do not resume, not even after out of memory or a restart by a launcher",
    )
    add(
        "--checkpoint-seconds",
        type=number,
        metavar="X",
        help="maximum seconds between checkpoints (default: 600)",
    )
    return parser


def when_to_resume(text: str) -> Resume:
    """Return when to resume a run: "always" (the option without a value), "auto" or "never"."""
    if text in ("always", "auto", "never"):
        return cast("Resume", text)
    if Path(text).is_dir():
        message = f"--resume does not take a folder; use --resume --out {text}"
    else:
        message = f"{text!r} must be auto, never or omitted; put a recipe first: {text} --resume"
    raise ArgumentTypeError(message)


def _newest_run() -> str:
    """Return a hint with the newest run, to append to a message; empty without runs."""
    headers = sorted(RUNS.glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    return f": the newest is --out {headers[-1].parent}" if headers else ""
