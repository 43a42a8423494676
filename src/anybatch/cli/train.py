"""`anybatch train`: parse the options of a run, and report errors in them before importing torch."""

import dataclasses
import difflib
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Literal, cast

from anybatch.cli.command import (
    DEFAULT_RECIPE,
    RUNS,
    Parser,
    add_recipe,
    add_settings,
    frozen_imports,
    let_threads_sleep,
    number,
    positive_int_or_auto,
    settings_of,
)
from anybatch.core.run_config import RunConfig
from anybatch.errors import UserError
from anybatch.parallel.launchers import start_fork_server

OWN_OPTIONS: Final = (
    *(field.name.replace("_", "-") for field in dataclasses.fields(RunConfig)),
    *("ranks", "out", "resume", "checkpoint-seconds", "log"),
)

FOREIGN: Final = {
    "--effective-batch-size N": "global-batch-size train-batch-size total-batch-size batch-size bs b",
    "--micro-batch-size N": (
        "per-device-train-batch-size per-gpu-train-batch-size train-micro-batch-size-per-gpu local-batch-size "
        "device-batch-size micro-batch mbs"
    ),
    "--accumulation-steps N": (
        "gradient-accumulation-steps gradient-accumulation grad-accum grad-accum-steps accum-steps accum-iter "
        "accumulate-grad-batches update-freq"
    ),
    "--ranks N": "num-processes nproc-per-node devices gpus num-gpus world-size num-devices",
    "torchrun ... -m anybatch train": "num-nodes nnodes num-machines master-addr master-port rdzv-endpoint node-rank",
    "--epochs N": "num-train-epochs max-epochs num-epochs",
    "--steps N": "max-steps train-iters max-iters num-steps max-train-steps iterations total-steps",
    "--learning-rate X": "lr max-lr peak-lr",
    "--precision bf16": "fp16 amp use-amp mixed-precision bf16 dtype torch-dtype",
    "--out FOLDER": "output-dir out-dir save-dir default-root-dir project-dir logdir log-dir",
    "--resume --out FOLDER": "resume-from-checkpoint resume-from ckpt-path load checkpoint load-checkpoint",
    "--checkpoint-seconds X": "save-steps save-interval checkpointing-steps save-freq",
    "--strategy NAME": "use-distributed-optimizer zero-stage fsdp deepspeed ddp",
    "Job(clip=, optimizer=, scheduler=, model=, dataset=)": (
        "max-grad-norm clip-grad gradient-clip-val clip-grad-norm weight-decay optim optimizer momentum warmup-steps "
        "warmup-ratio lr-scheduler-type scheduler model model-name-or-path dataset data-path data loss"
    ),
}
"""Our option, and its names in other libraries, without prefixes such as `trainer.`."""
_DIFFERENCES: Final = {
    "--effective-batch-size N": (
        ": samples of one optimizer step over all ranks. Multiply a batch size per device by the accumulation steps "
        "and the ranks"
    ),
    "--micro-batch-size N": (
        ": samples per forward and backward on one device. It does not change the batch per optimizer step: also set "
        "--effective-batch-size (micro-batch size x accumulation steps x ranks)"
    ),
    "--accumulation-steps N": (
        ": micro-batches per rank and step. It does not enlarge the effective batch; usually you can omit it"
    ),
    "Job(clip=, optimizer=, scheduler=, model=, dataset=)": (
        ": it is part of the recipe; `anybatch init train.py` writes a starter recipe"
    ),
}
"""Explanations for options whose values have a different meaning, or another place, in other libraries."""


def explain_unknown(unknown: Sequence[str]) -> str:
    """Return an error about unknown options, with our name for another library's option or a similar option."""
    options = [text for text in unknown if text.startswith("-")]
    if not options:
        return f"unknown argument {unknown[0]!r}. Pass one recipe; options begin with --"
    name = options[0].lstrip("-").partition("=")[0].replace("_", "-").casefold()
    for ours, theirs in FOREIGN.items():
        if name.rpartition(".")[2] in theirs.split():
            return f"unknown option --{name}; here it is `{ours}`{_DIFFERENCES.get(ours, '')}."
    near = difflib.get_close_matches(name, OWN_OPTIONS, n=1)
    hint = f"Did you mean --{near[0]}?" if near else f"Options: {', '.join(f'--{word}' for word in OWN_OPTIONS)}."
    return f"unknown option --{name}. {hint}"


PRELOADED = ("anybatch.cli.local_ranks", "torch._dynamo")
"""Modules that the fork server of the ranks imports, so that a rank's first optimizer need not import torch._dynamo."""
Resume = Literal["always", "auto", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """A requested run.

    None means: the value of the resumed run, else the default. `resume` is "always"; "auto", to resume if `folder`
    contains a run, and after an out-of-memory error; "never"; or None, to resume only after an out-of-memory error,
    or when the launcher restarts these ranks.
    """

    recipe: str | None
    folder: Path | None
    resume: Resume | None
    ranks: int | Literal["auto"] | None
    checkpoint_seconds: float | None = None
    config: RunConfig
    loggers: tuple[str, ...] = ()
    json: Path | None = None
    quiet: bool = False
    verb: ClassVar[str] = "train"


def short_name(recipe: str) -> str:
    """Return a short name for a recipe: `digits`, and `train` for `jobs/train.py:main` or `jobs.train:main`."""
    source, _, function = recipe.rpartition(":")
    # The colon of a Windows drive does not separate a function.
    source = source if source and function.isidentifier() else recipe
    return Path(source).stem if source.endswith(".py") else source.rpartition(".")[2]


_DESCRIPTION = (
    "Train a recipe at a given effective batch size: the samples of one optimizer step, over all ranks. "
    "The split into micro-batches and ranks depends on the hardware and does not change the result."
)
_EPILOG = (
    "Exit status: 0 success, 1 error in the recipe, 2 invalid option or file, 3 stopped on request and saved, 4 loss "
    "or gradient not finite, 5 full disk or damaged checkpoint, 6 a rank failed, 7 out of memory."
)


def run(argv: Sequence[str]) -> int:
    """Run `anybatch train` and return the exit status."""
    request = read_request(argv)
    let_threads_sleep()
    # Before importing torch, so that the server and this process import it in parallel.
    if request.ranks not in (None, "auto", 1):
        start_fork_server(*PRELOADED)
    with frozen_imports():
        from anybatch.cli.launch import launch

    return launch(request)


def read_request(argv: Sequence[str]) -> TrainRequest:
    """Return the request of a command line, or exit with the first error in it."""
    parser = make_parser()
    args = parser.parse(argv)
    if args.resume in ("always", "auto") and args.out is None:
        newest = _newest_run() if args.resume == "always" else ""
        parser.error(f"--resume needs --out, the folder of the run to resume{newest}")
    try:
        config = settings_of(args)
    except UserError as error:
        parser.error(str(error))
    # The resumed run or the recipe provides the omitted options.
    return TrainRequest(
        recipe=args.recipe,
        folder=args.out,
        resume=args.resume,
        ranks=args.ranks,
        checkpoint_seconds=args.checkpoint_seconds,
        config=config,
        loggers=tuple(dict.fromkeys(args.log)),
        json=args.json,
        quiet=args.quiet,
    )


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("train", _DESCRIPTION, epilog=_EPILOG, explain_unknown=explain_unknown)
    add = parser.add_argument
    add_recipe(parser, None, DEFAULT_RECIPE)
    add_settings(add, *(field.name for field in dataclasses.fields(RunConfig)))
    add(
        "--ranks",
        type=positive_int_or_auto,
        metavar="N",
        help="processes on this machine; auto: one per accelerator, or one on a CPU (default: auto)",
    )
    add("--out", type=Path, metavar="FOLDER", help=f"folder for log and checkpoints (default: {RUNS}/RECIPE-DATE-TIME)")
    add(
        "--resume",
        type=when_to_resume,
        nargs="?",
        const="always",
        metavar="auto|never",
        help="resume the run in --out with its settings, except for those given here; auto: resume if the run exists, "
        "else start it; never: do not resume, not even after an out-of-memory error or a restart by a launcher",
    )
    add("--checkpoint-seconds", type=number, metavar="X", help="maximum seconds between checkpoints (default: 600)")
    add(
        "--log",
        action="append",
        choices=("wandb", "mlflow", "trackio", "comet"),
        default=[],
        help="also log to this library, in addition to the JSON lines and TensorBoard; repeatable",
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
