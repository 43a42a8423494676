"""The lines that a user writes for a change: they name the user's own modules, and run as they stand."""

from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap

from torch import nn

from anybatch.core.blocks import Blocks
from anybatch.parallel.strategy import Strategy
from anybatch.planner.trace.checkpointing import Keeping

_LOADS_IN_FOUR_BITS = ("transformers", "diffusers")
"""Libraries whose models are rounded to 4 bits as they are loaded."""


def engine_line(arguments: str) -> str:
    """Return the line that makes the engine with further arguments; empty without any.

    Args:
        arguments: as code.
    """
    return f"engine = ab.Engine(..., {arguments})" if arguments else ""


def strategy_lines(strategy: str | Callable[[], Strategy]) -> tuple[list[str], str]:
    """Return the lines before an engine with a strategy, and its argument; FSDP's functions are those of `ranking`.

    Args:
        strategy: by its name, or FSDP2 that gathers weights in bf16, which has none.
    """
    as_function = "# the optimizer as a function: named_parameters -> optimizer"
    if isinstance(strategy, str):
        return [as_function] if strategy == "fsdp" else [], f'strategy="{strategy}"'
    return [
        "from anybatch.parallel.fsdp import FSDP",
        "from anybatch.parallel.sharding import Sharding",
        as_function,
    ], "strategy=FSDP(Sharding(param_dtype=torch.bfloat16))"


def checkpointing_lines(rows: Sequence[Blocks], keeping: Keeping, every: int, called: Mapping[str, str]) -> list[str]:
    """Return the lines that let blocks run again in the backward.

    Args:
        rows: the blocks.
        keeping: what a block keeps.
        every: second one, or each.
        called: as in `StepSpec`.
    """
    lines = ["from functools import partial", "from torch.utils.checkpoint import checkpoint"]
    again = ["again = partial(checkpoint, use_reentrant=False)"]
    if keeping == "products":
        lines += [
            "from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts",
            "aten = torch.ops.aten",
            "products = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default,",
            "            aten._scaled_dot_product_flash_attention.default,",
            "            aten._scaled_dot_product_efficient_attention.default}",
            "def keep(context, operation, *args, **kwargs):",
            "    policy = CheckpointPolicy",
            "    return policy.MUST_SAVE if operation in products else policy.PREFER_RECOMPUTE",
        ]
        again = [
            "again = partial(checkpoint, use_reentrant=False,",
            "                context_fn=partial(create_selective_checkpoint_contexts, keep))",
        ]
    lines += again
    for loop in _loops(rows, every, called):
        lines += [*loop, "    block.forward = partial(again, block.forward)"]
    return lines


def offloading_lines(rows: Sequence[Blocks], called: Mapping[str, str]) -> list[str]:
    """Return the lines that keep what blocks save in the host's memory.

    Args:
        rows: the blocks.
        called: as in `StepSpec`.
    """
    lines = [
        "def offloaded(forward):",
        "    def run(*args, **kwargs):",
        "        with torch.autograd.graph.save_on_cpu(pin_memory=True):",
        "            return forward(*args, **kwargs)",
        "    return run",
    ]
    for loop in _loops(rows, 1, called):
        lines += [*loop, "    block.forward = offloaded(block.forward)"]
    return lines


def adapter_lines(names: Sequence[str], rank: int, called: Mapping[str, str]) -> list[str]:
    """Return the lines that put peft's adapters on layers.

    Args:
        names: of the layers, as `linear_names` has them.
        rank: of the adapters.
        called: as in `StepSpec`.
    """
    shown = wrap(repr(list(names)), 88, break_long_words=False, break_on_hyphens=False)
    # Of a model that stands for one of transformers, peft knows the layers by a word.
    targets, layers = "'all-linear'", []
    if not called:
        targets, layers = "layers", ["layers = " + ("\n" + 11 * " ").join(shown)]
    return [
        "from peft import LoraConfig, get_peft_model",
        *layers,
        f"adapters = LoraConfig(r={rank}, lora_alpha={2 * rank}, target_modules={targets})",
        "model = get_peft_model(model, adapters)",
    ]


def four_bit_lines(model: nn.Module, rows: Sequence[Blocks], called: Mapping[str, str]) -> list[str]:
    """Return the lines that keep the linear layers of blocks in 4 bits: as transformers loads them, or layer by layer.

    Args:
        model: has the blocks.
        rows: the blocks.
        called: as in `StepSpec`.
    """
    library, _, _ = type(model).__module__.partition(".")
    loader = type(model).__name__
    if called:  # it stands for a model of transformers that predicts the next token
        library, loader = "transformers", "AutoModelForCausalLM"
    if library in _LOADS_IN_FOUR_BITS:
        return [
            f"from {library} import BitsAndBytesConfig, {loader}",
            "four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4',",
            "                               bnb_4bit_use_double_quant=True,",
            "                               bnb_4bit_compute_dtype=torch.bfloat16)",
            f"model = {loader}.from_pretrained(..., quantization_config=four_bits)",
        ]
    lines = [
        "import bitsandbytes as bnb",
        "def in_four_bits(linear):",
        "    layer = bnb.nn.Linear4bit(linear.in_features, linear.out_features, linear.bias is not None,",
        "                              compute_dtype=torch.bfloat16, quant_type='nf4')",
        "    layer.load_state_dict(linear.state_dict())",
        "    return layer",
    ]
    for loop in _loops(rows, 1, called):
        lines += [
            *loop,
            "    linears = [name for name, one in block.named_modules() if type(one) is torch.nn.Linear]",
            "    for name in linears:",
            "        block.set_submodule(name, in_four_bits(block.get_submodule(name)))",
        ]
    # peft goes by this attribute, which loaders set.
    return [*lines, "model.to(torch.bfloat16).cuda()  # rounds them", "model.is_loaded_in_4bit = True"]


def _loops(rows: Sequence[Blocks], every: int, called: Mapping[str, str]) -> list[list[str]]:
    """Return the heads of loops over repeated blocks: by class, so that they hold of a model that adapters wrap.

    Args:
        rows: the blocks.
        every: second one, or each.
        called: as in `StepSpec`.
    """
    kinds = [called.get(blocks.kind.__name__, blocks.kind.__name__) for blocks in rows]
    # Of several rows of one class every second block is one of each row.
    if every == 1 or len(set(kinds)) == len(kinds):
        step = "" if every == 1 else f"[::{every}]"
        found = "[one for one in model.modules() if type(one).__name__ == {!r}]"
        return [[f"blocks = {found.format(kind)}", f"for block in blocks{step}:"] for kind in dict.fromkeys(kinds)]
    loops = []
    for blocks, kind in zip(rows, kinds, strict=True):
        where = called.get(blocks.path, blocks.path)
        path = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in where.split(".") if part)
        of_kind = f"type(one).__name__ == {kind!r}"
        loops.append(
            [
                f"blocks = [one for one in model{path}.children() if {of_kind}]",
                f"for block in blocks[::{every}]:",
            ]
        )
    return loops
