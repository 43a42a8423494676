"""All claims, in the order of the page: four advantages, four limitations, recipes, devices, sizes of the batch."""

from collections.abc import Mapping
from types import MappingProxyType

from anybatch_guide.claims import costs, equality, learning, rules
from anybatch_guide.claims.batch_size_claims import BATCH_SIZE_CLAIMS
from anybatch_guide.claims.claim import Claim, Number
from anybatch_guide.claims.device_claims import DEVICE_CLAIMS

_ERROR = "relative error of the gradient"


_CLAIMS = (
    Claim(
        name="less_memory",
        side="advantage",
        title="Less memory",
        said="Accumulation needs less memory than the batch at once.",
        how="The engine trains the digits network on 64 samples a step; every tensor of one step is booked.",
        measure=costs.less_memory,
        numbers={
            "peak_at_once": Number("peak, 64 at once", "bytes"),
            "peak_in_four": Number("peak, 16 x 4", "bytes"),
            "peak_one_by_one": Number("peak, 1 x 64", "bytes"),
            "ratio_in_four": Number("16 x 4 as a part of 64 at once"),
            "kept_one_by_one": Number("part of the 1 x 64 peak that no cut makes smaller"),
        },
        rule=rules.less_memory,
        rule_in_words="True if four micro-batches take less than nine tenths of the memory of the batch at once.",
        texts={
            "true": (
                "The peak falls from {peak_at_once} to {peak_in_four}. Only activations shrink with the micro-batch: "
                "weights, gradients and optimizer state stay, so a quarter of the batch is not a quarter of the "
                "memory, and cut down to single samples {peak_one_by_one} are left."
            ),
            "false": "The peak hardly falls: from {peak_at_once} to {peak_in_four}. What stays outweighs activations.",
        },
        seconds=2,
    ),
    Claim(
        name="equivalent",
        side="advantage",
        title="The same gradient",
        said="Accumulation is mathematically equivalent to the large batch.",
        how="One gradient of 64 samples at once, and one summed over micro-batches and divided by their number.",
        measure=equality.equivalent,
        numbers={
            "even_error": Number(f"{_ERROR}, 16 x 4", noisy=True),
            "even_error_fp64": Number("the same in float64", noisy=True),
            "uneven_error": Number("micro-batches of 24, 24 and 16"),
            "token_error": Number("sentences of unequal length, 4 x 16"),
            "batch_norm_error": Number("a network with BatchNorm, 16 x 4"),
            "dropout_error": Number("a network with dropout, same seed, 16 x 4"),
        },
        rule=rules.equivalent,
        rule_in_words=(
            "True if every relative error is below 1e-4; true only if the first one is and others are not; else false."
        ),
        texts={
            "true": "In every case the gradients agree up to rounding; the largest error was {uneven_error}.",
            "only_if": (
                "For equal micro-batches the error is {even_error}, which is rounding. It is {uneven_error} where "
                "sizes differ, {token_error} where sentences differ in length, {batch_norm_error} with BatchNorm, and "
                "{dropout_error} with dropout. The first two are cured if each part counts by what it holds, the last "
                "two are not."
            ),
            "false": "Even for equal micro-batches the gradients differ by {even_error}.",
        },
        seconds=3,
    ),
    Claim(
        name="on_cpus",
        side="advantage",
        title="Any hardware",
        said="Accumulation works on any hardware, on CPUs too.",
        how="This machine, which has only a CPU, computes a gradient in parts and at once, and books its memory.",
        measure=equality.on_cpus,
        numbers={
            "gradient_error": Number(f"{_ERROR} on this CPU", noisy=True),
            "memory_ratio": Number("peak of 4 x 16 as a part of 64 at once"),
        },
        rule=rules.on_cpus,
        rule_in_words="True if the error on this machine is below 1e-4, and the memory is smaller.",
        texts={
            "true": (
                "On this CPU the gradients agree to {gradient_error}, and the peak is {memory_ratio} of what the batch "
                "at once takes. Accumulation is only a loop, so nothing in it belongs to a device."
            ),
            "false": "On this CPU the error is {gradient_error}, and the peak {memory_ratio} of the batch at once.",
        },
        seconds=2,
    ),
    Claim(
        name="three_lines",
        side="advantage",
        title="Three lines",
        said="Accumulation takes three extra lines in a training loop.",
        how="Changed lines are counted, and the loops are judged by `anybatch check --loop`, on unequal micro-batches.",
        measure=equality.three_lines,
        numbers={
            "changed_lines": Number("lines, as usual", "lines"),
            "findings": Number("what is wrong with that loop", "findings"),
            "changed_lines_right": Number("lines, right", "lines"),
            "findings_right": Number("what is wrong with that one", "findings"),
            "changed_lines_engine": Number("lines, with anybatch", "lines"),
        },
        rule=rules.three_lines,
        rule_in_words=(
            "False if the usual loop takes more than three lines; true only if it takes three and the checker finds "
            "something in it; else true."
        ),
        texts={
            "true": "{changed_lines} lines change; faults that the checker finds: {findings}.",
            "only_if": (
                "{changed_lines} lines change, and they are right only if every micro-batch and every window is full. "
                "Otherwise the checker finds faults, {findings} here. A right loop changes {changed_lines_right} lines "
                "too, with two small functions to count with, and anybatch changes {changed_lines_engine}."
            ),
            "false": "{changed_lines} lines change.",
        },
        seconds=2,
    ),
    Claim(
        name="n_times_longer",
        side="limitation",
        title="N times longer",
        said="A step with N micro-batches takes about N times as long.",
        how="Processor time of one step on digits, on one thread; medians over interleaved rounds.",
        measure=costs.n_times_longer,
        numbers={
            "accumulation_steps": Number("N"),
            "ratio_to_same_samples": Number("time of 16 x 4 against 64 at once", "x", noisy=True),
            "ratio_to_one_micro_batch": Number("time of 16 x 4 against 16 x 1", "x", noisy=True),
        },
        rule=rules.n_times_longer,
        rule_in_words=(
            "True if the step takes over three quarters of N times as long as the same samples at once; true only if "
            "it takes over half of N times as long as one micro-batch; else false."
        ),
        texts={
            "true": "The step takes {ratio_to_same_samples} as long as the same samples at once, for N of "
            "{accumulation_steps}.",
            "only_if": (
                "It is so only if you compare with a step over a fraction of the samples: there it takes "
                "{ratio_to_one_micro_batch} as long, for N of {accumulation_steps}. Against the same samples at once "
                "it takes {ratio_to_same_samples} as long."
            ),
            "false": "The step takes {ratio_to_same_samples} as long as the same samples at once.",
        },
        seconds=3,
    ),
    Claim(
        name="batch_norm",
        side="limitation",
        title="BatchNorm",
        said="BatchNorm sees micro-batches only, so accumulation changes what it computes.",
        how="Gradients at the start, then 80 steps on shapes at 64 samples a step; medians over three seeds.",
        measure=learning.batch_norm,
        numbers={
            "gradient_error": Number(f"{_ERROR}, BatchNorm, 4 x 16"),
            "group_norm_error": Number("the same, GroupNorm", noisy=True),
            "loss_64": Number("training loss, 64 at once"),
            "accuracy_64": Number("accuracy, 64 at once", "%"),
            "loss_16": Number("training loss, 16 x 4"),
            "accuracy_16": Number("accuracy, 16 x 4", "%"),
            "loss_4": Number("training loss, 4 x 16"),
            "accuracy_4": Number("accuracy, 4 x 16", "%"),
        },
        rule=rules.batch_norm,
        rule_in_words=(
            "True if the gradient of the network with BatchNorm is off by over 1e-2, and that with GroupNorm by less "
            "than 1e-4."
        ),
        texts={
            "true": (
                "With BatchNorm the gradient of 4 x 16 is off by {gradient_error}; with GroupNorm by "
                "{group_norm_error}. The training loss rises from {loss_64} to {loss_4}, and the accuracy on pictures "
                "that were held out goes from {accuracy_64} to {accuracy_4}."
            ),
            "only_if": "The gradient is off by {gradient_error} with BatchNorm, and by {group_norm_error} without.",
            "false": "With BatchNorm the gradient is off by {gradient_error} only.",
        },
        seconds=25,
        tolerance=0.1,
    ),
    Claim(
        name="stale_gradients",
        side="limitation",
        title="Stale gradients",
        said="Gradients of early micro-batches are stale when the optimizer steps.",
        how="Twenty steps of Adam on digits, 16 x 4: how far do parameters move inside a window?",
        measure=equality.stale,
        numbers={
            "moved": Number("largest change of a parameter inside a window"),
            "gradient_error": Number(f"largest {_ERROR}", noisy=True),
            "moved_if_stepped": Number("change per window, relative, if each micro-batch stepped"),
        },
        rule=rules.stale,
        rule_in_words="True if a parameter changes inside a window, or a gradient is off by over 1e-2; else false.",
        texts={
            "true": "Parameters move by {moved} inside a window, and the gradient is off by {gradient_error}.",
            "false": (
                "Parameters move by {moved} inside a window: all micro-batches see the same ones, as the samples of a "
                "large batch do, and the gradient agrees to {gradient_error}. Stepping after each micro-batch would "
                "move them by {moved_if_stepped} meanwhile; that is the small batch, which nobody calls stale."
            ),
        },
        seconds=3,
    ),
    Claim(
        name="not_free",
        side="limitation",
        title="Memory is not free",
        said="Accumulation keeps gradients, which take as much memory as the parameters.",
        how="The engine trains digits, with one micro-batch of 16 and with four; every tensor of one step is booked.",
        measure=costs.not_free,
        numbers={
            "weight_bytes": Number("weights", "bytes"),
            "extra_in_forward": Number("more gradients during a forward", "bytes"),
            "extra_at_peak": Number("higher peak", "bytes"),
            "peak_bytes": Number("peak, 16 x 4", "bytes"),
        },
        rule=rules.not_free,
        rule_in_words=(
            "False if the peak is not higher than with one micro-batch; true if in addition a copy of all gradients "
            "is held during a forward; else true only if."
        ),
        texts={
            "true": (
                "From the second micro-batch on one copy of the gradients, {extra_in_forward}, is there during the "
                "forward, and the peak is {extra_at_peak} higher than with one micro-batch. It is one copy, however "
                "many micro-batches there are, and the peak is {peak_bytes}."
            ),
            "only_if": "The peak is {extra_at_peak} higher, less than the weights, {weight_bytes}.",
            "false": "The peak is not higher than with one micro-batch.",
        },
        seconds=2,
    ),
    Claim(
        name="small_micro_batches",
        side="limitation",
        title="Small micro-batches",
        said="A small micro-batch uses the machine badly, so each step gets slower.",
        how="Processor time of a step over 64 digits, on one thread; medians over interleaved rounds.",
        measure=costs.small_micro_batches,
        numbers={
            "ratio_16": Number("time of 16 x 4 against 64 at once", "x", noisy=True),
            "ratio_4": Number("time of 4 x 16", "x", noisy=True),
            "ratio_1": Number("time of 1 x 64", "x", noisy=True),
        },
        rule=rules.small_micro_batches,
        rule_in_words=(
            "False if single samples cost less than a fifth more time; true if micro-batches of 16 cost over a fifth "
            "more already; else true only if micro-batches are very small."
        ),
        texts={
            "true": (
                "The same 64 samples take {ratio_16} as long in four parts, {ratio_4} in sixteen, and {ratio_1} one by "
                "one. This is a small network on a CPU; where a micro-batch fills the device, the first "
                "number comes close to one."
            ),
            "only_if": (
                "Only if they are very small: 64 samples take {ratio_16} as long in four parts, {ratio_4} in sixteen, "
                "and {ratio_1} one by one."
            ),
            "false": "One by one, 64 samples take {ratio_1} as long as at once.",
        },
        seconds=6,
    ),
    Claim(
        name="larger_is_faster",
        side="recipe",
        title="As large as fits",
        said="The larger the micro-batch, the faster the training.",
        how="Processor time of a step over 256 digits, on one thread; medians over interleaved rounds.",
        measure=costs.larger_is_faster,
        numbers={
            "gain_1_to_4": Number("faster from 1 to 4", "x", noisy=True),
            "gain_4_to_16": Number("faster from 4 to 16", "x", noisy=True),
            "gain_16_to_64": Number("faster from 16 to 64", "x", noisy=True),
            "gain_64_to_256": Number("faster from 64 to 256", "x", noisy=True),
        },
        rule=rules.larger_is_faster,
        rule_in_words=(
            "False if four samples at a time are less than a tenth faster than one; true only up to a size if the "
            "last gain is less than two thirds of the first; else true."
        ),
        texts={
            "true": "From 1 to 4 it is {gain_1_to_4} as fast, and from 64 to 256 still {gain_64_to_256}.",
            "only_if": (
                "It holds up to a size. From 1 to 4 samples training is {gain_1_to_4} as fast, from 4 to 16 "
                "{gain_4_to_16}, from 16 to 64 {gain_16_to_64}, and from 64 to 256 {gain_64_to_256}. Beyond what fills "
                "the device, memory is spent for nothing."
            ),
            "false": "From 1 to 4 samples training is {gain_1_to_4} as fast.",
        },
        seconds=12,
    ),
    Claim(
        name="divide_by_n",
        side="recipe",
        title="Divide by N",
        said="Dividing the loss by the number of micro-batches is the key step.",
        how="Gradients of 64 samples at once against sums over micro-batches, each divided by N, or weighed by items.",
        measure=equality.divide_by_n,
        numbers={
            "even_error": Number("divided by N: 16 x 4", noisy=True),
            "uneven_error": Number("divided by N: 24, 24 and 16"),
            "token_error": Number("divided by N: sentences of unequal length"),
            "uneven_error_by_items": Number("weighed by items: 24, 24 and 16", noisy=True),
            "token_error_by_items": Number("weighed by items: sentences", noisy=True),
        },
        rule=rules.divide_by_n,
        rule_in_words=(
            "False if dividing by N is off by over 1e-4 for equal micro-batches; true only if it is off by over 1e-2 "
            "for others; else true."
        ),
        texts={
            "true": "Divided by N the gradient is right: {even_error}, {uneven_error} and {token_error}.",
            "only_if": (
                "Only for micro-batches that count the same, where the error is {even_error}. It is {uneven_error} "
                "for 24, 24 and 16 samples, and {token_error} for sentences of unequal length. Weighed by what each "
                "counts, both are right: {uneven_error_by_items} and {token_error_by_items}."
            ),
            "false": "Even for equal micro-batches the error is {even_error}.",
        },
        seconds=2,
    ),
    Claim(
        name="forgetting",
        side="recipe",
        title="Forget to divide",
        said="Forgetting to divide makes training diverge.",
        how="Two epochs of digits, 4 x 16, as it should be and without dividing by 16; medians over three seeds.",
        measure=learning.forgetting,
        numbers={
            "chance": Number("loss of chance"),
            "sgd_right": Number("final loss, SGD, right"),
            "sgd_no_division": Number("final loss, SGD, not divided"),
            "adam_right": Number("final loss, Adam, right"),
            "adam_no_division": Number("final loss, Adam, not divided"),
        },
        rule=rules.forgetting,
        rule_in_words=(
            "Training has diverged if the final loss is not below 0.95 of chance. True if it does by SGD and by Adam; "
            "true only if it does by one of them; else false."
        ),
        texts={
            "true": "By SGD the loss ends at {sgd_no_division}, by Adam at {adam_no_division}; chance is {chance}.",
            "only_if": (
                "By SGD it does: the loss ends at {sgd_no_division} instead of {sgd_right}, and chance is {chance}. By "
                "Adam it ends at {adam_no_division} instead of {adam_right}: Adam divides by the size of gradients, so "
                "a factor cancels. Clipping and weight decay in the loss still feel it."
            ),
            "false": "The loss ends at {sgd_no_division} by SGD and at {adam_no_division} by Adam, below {chance}.",
        },
        seconds=25,
        tolerance=0.1,
    ),
    Claim(
        name="sync_batch_norm",
        side="recipe",
        title="SyncBatchNorm",
        said="SyncBatchNorm gives BatchNorm the statistics of the whole batch back.",
        how="Gradients of 64 shapes in four micro-batches of 16, against those of the 64 at once.",
        measure=equality.sync_batch_norm,
        numbers={
            "plain_error": Number(f"{_ERROR}, BatchNorm"),
            "sync_error": Number("SyncBatchNorm, one rank"),
            "sync_error_2_ranks": Number("over 2 ranks: groups of 32"),
            "sync_error_4_ranks": Number("over 4 ranks: nothing is accumulated", noisy=True),
            "exact_error": Number('anybatch, norms="exact"', noisy=True),
        },
        rule=rules.sync_batch_norm,
        rule_in_words=(
            "True if the error on one rank is below 1e-4; true only if it is with as many ranks as micro-batches; "
            "else false."
        ),
        texts={
            "true": "With it the gradient is off by {sync_error} only.",
            "only_if": (
                "It joins what ranks compute at one moment, not what one rank computes in turn. Where micro-batches "
                "follow each other on one rank, the error stays at {sync_error}; over two ranks it is "
                "{sync_error_2_ranks}; it goes away ({sync_error_4_ranks}) only if nothing is accumulated. The "
                "engine's exact BatchNorm lets micro-batches wait for each other: {exact_error}."
            ),
            "false": "The error is {plain_error} without it and {sync_error} with it.",
        },
        seconds=2,
    ),
)
CLAIMS: Mapping[str, Claim] = MappingProxyType(
    {claim.name: claim for claim in (*_CLAIMS, *DEVICE_CLAIMS, *BATCH_SIZE_CLAIMS)}
)
