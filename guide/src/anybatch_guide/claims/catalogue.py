"""All claims, in the order of the page: four advantages, four limitations, recipes, devices, sizes of the batch."""

from collections.abc import Mapping
from types import MappingProxyType

from anybatch_guide.claims import costs, equality, learning, rules
from anybatch_guide.claims.batch_size import BATCH_SIZE_CLAIMS
from anybatch_guide.claims.claim import Claim, Number
from anybatch_guide.claims.devices import DEVICE_CLAIMS

_ERROR = "relative error of the gradient"


_CLAIMS = (
    Claim(
        name="less_memory",
        side="advantage",
        title="Less memory",
        statement="Accumulation needs less memory than the whole batch in one pass.",
        how="The engine trains the digits network with AdamW, 64 samples per step. Every tensor of a step is counted.",
        measure=costs.less_memory,
        numbers={
            "peak_at_once": Number("peak, 64 in one pass", "bytes"),
            "peak_in_four": Number("peak, 16 x 4", "bytes"),
            "peak_one_by_one": Number("peak, 1 x 64", "bytes"),
            "ratio_in_four": Number("16 x 4 peak / 64 in one pass"),
            "kept_one_by_one": Number("fraction of the 1 x 64 peak that does not depend on the split"),
        },
        rule=rules.less_memory,
        rule_in_words="True: four micro-batches need less than 90% of the memory of one pass. False: otherwise.",
        texts={
            "true": (
                "In four parts, the peak of the digits network falls from {peak_at_once} to {peak_in_four}: slightly "
                "more than on the first screen, because anybatch's training engine also holds the next micro-batch. "
                "Only activations shrink with the micro-batch; weights, gradients and optimizer state keep their "
                "size. So a quarter of the batch needs more than a quarter of the memory, and single samples still "
                "need {peak_one_by_one}."
            ),
        },
        seconds=2,
    ),
    Claim(
        name="equivalent",
        side="advantage",
        title="The same gradient",
        statement="Accumulation is mathematically equivalent to the large batch.",
        how="The gradient of 64 samples in one pass, against the sum over N micro-batches, divided by N.",
        measure=equality.equivalent,
        numbers={
            "even_error": Number(f"{_ERROR}, 16 x 4", "error", noisy=True),
            "even_error_fp64": Number("the same in float64", "error", noisy=True),
            "uneven_error": Number("24 + 24 + 16 samples", "error"),
            "token_error": Number("sentences of unequal length, 4 x 16", "error"),
            "batch_norm_error": Number("a network with BatchNorm, 16 x 4", "error"),
            "dropout_error": Number("a network with dropout, same seed, 16 x 4", "error"),
        },
        rule=rules.equivalent,
        rule_in_words=(
            "True: every relative error is below 1e-4. True with a condition: the first one is, but others are not. "
            "False: otherwise."
        ),
        texts={
            "only_if": (
                "Equal micro-batches give the same gradient, up to rounding ({even_error}), if the network has "
                "neither BatchNorm nor dropout. On the digits network, it is off by {uneven_error} if their sizes "
                "differ (24 + 24 + 16), {token_error} if sentences differ in length, {batch_norm_error} with "
                "BatchNorm, and {dropout_error} with dropout. Weighting each micro-batch by its number of samples or "
                "tokens fixes the first two, but not the last two."
            ),
        },
        seconds=3,
    ),
    Claim(
        name="contrastive",
        side="advantage",
        title="Contrastive learning",
        statement="Accumulation provides the large batches that contrastive learning needs.",
        how=(
            "Two encoders learn which halves of 1,437 digits belong together, 15 epochs in batches of 256. Accuracy: "
            "matches found among 360 held-out images, the mean of three seeds. Errors are from the first step."
        ),
        measure=learning.contrastive,
        numbers={
            "accuracy_joint": Number("accuracy, `ab.joint`, 16 x 16", "%"),
            "accuracy_16": Number("accuracy, plain accumulation, 16 x 16", "%"),
            "accuracy_4": Number("accuracy, plain accumulation, 4 x 64", "%"),
            "chance": Number("accuracy of guessing", "%"),
            "plain_error": Number(f"{_ERROR}, plain accumulation, 16 x 16"),
            "joint_error": Number(f"{_ERROR}, `ab.joint`, 16 x 16", noisy=True),
        },
        rule=rules.contrastive,
        rule_in_words=(
            "True: the gradient error of plain accumulation is below 1e-4. True with a condition: the error of two "
            "passes is. False: otherwise."
        ),
        texts={
            "only_if": (
                "Only with two passes per batch: finding the other half of a held-out digit then succeeds for "
                "{accuracy_joint}, with plain accumulation for {accuracy_16}, by guessing for {chance}. A contrastive "
                "loss compares every sample with all others, and a micro-batch has fewer of them: the gradient is off "
                "by {plain_error}, and with smaller micro-batches only {accuracy_4} are found. `ab.joint` first "
                "computes all outputs without gradients, then runs each micro-batch again with the gradient of the "
                "full loss: off by {joint_error}."
            ),
        },
        seconds=60,
        tolerance=0.1,
    ),
    Claim(
        name="on_cpus",
        side="advantage",
        title="Any hardware",
        statement="Accumulation works on any hardware, even on CPUs.",
        how=(
            "On a machine without a GPU: gradients of 64 samples in one pass and in four micro-batches, and peak "
            "memory in sixteen. The project's tests for GPUs ran on one NVIDIA H200: "
            "`benchmarks/results/gpu_exactness_h200_2026-11-26.md`."
        ),
        measure=equality.on_cpus,
        numbers={
            "gradient_error": Number(f"{_ERROR} on this CPU", "error", noisy=True),
            "memory_ratio": Number("peak of 4 x 16 / peak of one pass", "x"),
        },
        rule=rules.on_cpus,
        rule_in_words=(
            "True with a condition: the error on this machine is below 1e-4, and the memory is smaller; one machine "
            "cannot show it for any hardware. False: otherwise."
        ),
        texts={
            "only_if": (
                "Only as far as tested: on one CPU here, gradients agree up to rounding ({gradient_error}); nothing in "
                "the loop depends on the device. In sixteen micro-batches, the step needs "
                "{memory_ratio} the peak memory of one pass."
            ),
        },
        seconds=2,
    ),
    Claim(
        name="three_lines",
        side="advantage",
        title="Three lines",
        statement="Accumulation takes three extra lines in a training loop.",
        how="Counts the changed lines, and runs `anybatch check --loop` with micro-batches of unequal size.",
        measure=equality.three_lines,
        numbers={
            "changed_lines": Number("changed lines, usual loop", "lines"),
            "findings": Number("findings in the usual loop", "findings"),
            "changed_lines_right": Number("changed lines, correct loop", "lines"),
            "findings_right": Number("findings in the correct loop", "findings"),
            "changed_lines_engine": Number("changed lines, anybatch", "lines"),
        },
        rule=rules.three_lines,
        rule_in_words=(
            "False: the usual loop changes more than three lines. True with a condition: at most three, but the "
            "checker finds a mistake. True: otherwise."
        ),
        texts={
            "only_if": (
                "{changed_lines} lines change, but the loop is correct only if every micro-batch and every window (the "
                "micro-batches of one step) is full. If one is not, `anybatch check` reports mistakes ({findings}). "
                "The correct loop also changes {changed_lines_right} lines, and calls two small functions that count "
                "items; anybatch changes {changed_lines_engine}."
            ),
        },
        seconds=2,
    ),
    Claim(
        name="n_times_longer",
        side="limitation",
        title="N times longer",
        statement="A step with N micro-batches takes about N times as long.",
        how="CPU time of one step on digits, on one thread; medians over interleaved rounds.",
        measure=costs.n_times_longer,
        numbers={
            "accumulation_steps": Number("N"),
            "ratio_to_same_samples": Number("time of 16 x 4 / time of one pass", "x", noisy=True),
            "ratio_to_one_micro_batch": Number("time of 16 x 4 / time of 16 x 1", "x", noisy=True),
        },
        rule=rules.n_times_longer,
        rule_in_words=(
            "True: the step takes more than 0.75 N times as long as the same samples in one pass. True with a "
            "condition: more than 0.5 N times as long as one micro-batch. False: otherwise."
        ),
        texts={
            "true": "With N = {accumulation_steps}, the step takes {ratio_to_same_samples} as long as the same samples "
            "in one pass.",
            "only_if": (
                "Only compared with a step of one micro-batch: {accumulation_steps} micro-batches take "
                "{ratio_to_one_micro_batch} as long, but train {accumulation_steps} times the samples. Compared with "
                "the same samples in one pass, it takes {ratio_to_same_samples} as long."
            ),
            "false": "The step takes {ratio_to_same_samples} as long as the same samples in one pass.",
        },
        seconds=3,
    ),
    Claim(
        name="batch_norm",
        side="limitation",
        title="BatchNorm",
        statement="BatchNorm uses the statistics of each micro-batch, so accumulation changes the result.",
        how="First gradients, then 80 steps on shapes with 64 samples per step; medians over three seeds.",
        measure=learning.batch_norm,
        numbers={
            "gradient_error": Number(f"{_ERROR}, BatchNorm, 4 x 16", "error"),
            "group_norm_error": Number("the same, GroupNorm", "error", noisy=True),
            "loss_64": Number("training loss, 64 in one pass"),
            "accuracy_64": Number("accuracy, 64 in one pass", "%"),
            "loss_16": Number("training loss, 16 x 4"),
            "accuracy_16": Number("accuracy, 16 x 4", "%"),
            "loss_4": Number("training loss, 4 x 16"),
            "accuracy_4": Number("accuracy, 4 x 16", "%"),
        },
        rule=rules.batch_norm,
        rule_in_words=(
            "True: the gradient error is above 1e-2 with BatchNorm, and below 1e-4 with GroupNorm. False: the error "
            "with BatchNorm is below 1e-2. True with a condition: otherwise."
        ),
        texts={
            "true": (
                "In micro-batches of four, a network for images of shapes has a gradient error of {gradient_error} "
                "with BatchNorm, and only rounding with GroupNorm. The rounding is {group_norm_error}, in float32. The "
                "error with BatchNorm depends on the micro-batch and on the network. With BatchNorm, the training loss "
                "rises from {loss_64} to {loss_4}, and the accuracy on held-out images changes from {accuracy_64} to "
                "{accuracy_4}."
            ),
        },
        seconds=25,
        tolerance=0.1,
    ),
    Claim(
        name="stale_gradients",
        side="limitation",
        title="Stale gradients",
        statement="Gradients of early micro-batches are stale when the optimizer steps.",
        how="Twenty steps of Adam on digits, 16 x 4: how much do parameters change within a window?",
        measure=equality.stale,
        numbers={
            "moved": Number("largest change of a parameter within a window"),
            "gradient_error": Number(f"largest {_ERROR}", "error", noisy=True),
            "moved_if_stepped": Number("relative change per window with a step after each micro-batch", "error"),
        },
        rule=rules.stale,
        rule_in_words="True: a parameter changes within a window, or a gradient error is above 1e-2. False: otherwise.",
        texts={
            "false": (
                "A gradient is stale (outdated) if the weights change after it was computed, but within a window, the "
                "largest change of a weight is {moved}. All micro-batches use the same weights, like the "
                "samples of a large batch, and the gradient error is "
                "{gradient_error}. A step after each micro-batch would change them by {moved_if_stepped}; but that is "
                "training with the small batch."
            ),
        },
        seconds=3,
    ),
    Claim(
        name="not_free",
        side="limitation",
        title="Memory is not free",
        statement="Accumulation keeps gradients in memory, which are as large as the parameters.",
        how="The engine trains digits with AdamW, with one micro-batch of 16 and with four. Every tensor is counted.",
        measure=costs.not_free,
        numbers={
            "weight_bytes": Number("weights", "bytes"),
            "extra_in_forward": Number("extra gradients during a forward", "bytes"),
            "extra_at_peak": Number("increase of the peak", "bytes"),
            "peak_bytes": Number("peak, 16 x 4", "bytes"),
        },
        rule=rules.not_free,
        rule_in_words=(
            "False: the peak is not higher than with one micro-batch. True: it is, and a copy of all gradients is in "
            "memory during a forward. True with a condition: otherwise."
        ),
        texts={
            "true": (
                "From the second micro-batch on, the sum of the earlier gradients ({extra_in_forward}) stays in memory "
                "during the forward, and the peak is higher. The sum is as large as the parameters, for any number of "
                "micro-batches. The peak rises by {extra_at_peak} to {peak_bytes}: by less than the sum, because the "
                "peak of a single micro-batch comes later in the backward, when some gradients exist and some "
                "activations are freed."
            ),
        },
        seconds=2,
    ),
    Claim(
        name="small_micro_batches",
        side="limitation",
        title="Small micro-batches",
        statement="Small micro-batches use the hardware poorly, so each step is slower.",
        how="CPU time of a step over 64 digits, on one thread; medians over interleaved rounds.",
        measure=costs.small_micro_batches,
        numbers={
            "ratio_16": Number("time of 16 x 4 / time of one pass", "x", noisy=True),
            "ratio_4": Number("time of 4 x 16", "x", noisy=True),
            "ratio_1": Number("time of 1 x 64", "x", noisy=True),
        },
        rule=rules.small_micro_batches,
        rule_in_words=(
            "False: single samples take less than 1.2 times as long as one pass. True with a condition: otherwise; one "
            "network cannot show it for all, and the transformer of the chapter on memory is not slower in four."
        ),
        texts={
            "only_if": (
                "Only if they are too small to keep the device busy: in the small digits network on a CPU, "
                "64 samples take {ratio_16} as long in four micro-batches, and {ratio_1} one by one. In sixteen, they "
                "take {ratio_4} as long. The larger transformer of the chapter on memory is not slower in four."
            ),
            "false": "One by one, 64 samples take {ratio_1} as long as in one pass.",
        },
        seconds=6,
    ),
    Claim(
        name="larger_is_faster",
        side="recipe",
        title="As large as fits",
        statement="The larger the micro-batch, the faster the training.",
        how="CPU time of a step over 256 digits, on one thread; medians over interleaved rounds.",
        measure=costs.larger_is_faster,
        numbers={
            "gain_1_to_4": Number("speed-up from 1 to 4", "x", noisy=True),
            "gain_4_to_16": Number("speed-up from 4 to 16", "x", noisy=True),
            "gain_16_to_64": Number("speed-up from 16 to 64", "x", noisy=True),
            "gain_64_to_256": Number("speed-up from 64 to 256", "x", noisy=True),
        },
        rule=rules.larger_is_faster,
        rule_in_words=(
            "False: micro-batches of four are less than 1.1 times as fast as single samples. True with a condition: "
            "the last speed-up is less than two thirds of the first. True: otherwise."
        ),
        texts={
            "true": "The speed-up is {gain_1_to_4} from 1 to 4 samples, and still {gain_64_to_256} from 64 to 256.",
            "only_if": (
                "Only until the device is busy: on this CPU, going from 1 to 4 samples trains {gain_1_to_4} as fast, "
                "but going from 64 to 256 gains nothing. From 64 to 256 samples, training is {gain_64_to_256} as fast, "
                "from 4 to 16 {gain_4_to_16}, and from 16 to 64 {gain_16_to_64}. Once the device is busy, larger "
                "micro-batches only use more memory."
            ),
            "false": "The speed-up from 1 to 4 samples is {gain_1_to_4}.",
        },
        seconds=12,
    ),
    Claim(
        name="divide_by_n",
        side="recipe",
        title="Divide by N",
        statement="The key step is to divide the loss by the number of micro-batches.",
        how="Gradients of 64 samples in one pass, against sums over N parts: divided by N, or weighted by items.",
        measure=equality.divide_by_n,
        numbers={
            "even_error": Number("divided by N: 16 x 4", "error", noisy=True),
            "uneven_error": Number("divided by N: 24 + 24 + 16", "error"),
            "token_error": Number("divided by N: sentences of unequal length", "error"),
            "uneven_error_by_items": Number("weighted by items: 24 + 24 + 16", "error", noisy=True),
            "token_error_by_items": Number("weighted by items: sentences", "error", noisy=True),
        },
        rule=rules.divide_by_n,
        rule_in_words=(
            "False: the error of dividing by N is above 1e-4 for equal micro-batches. True with a condition: it is "
            "above 1e-2 for others. True: otherwise."
        ),
        texts={
            "only_if": (
                "Only for equal micro-batches: if the digits are split 24 + 24 + 16, dividing by 3 makes an error of "
                "{uneven_error} in the gradient (it depends on network and data). It is off by {token_error} for "
                "sentences of unequal length, and by {even_error} if all micro-batches have the same number of items. "
                "If micro-batches are weighted by their items, both are correct, up to {uneven_error_by_items} and "
                "{token_error_by_items}."
            ),
        },
        seconds=2,
    ),
    Claim(
        name="forgetting",
        side="recipe",
        title="Forget to divide",
        statement="Forgetting to divide makes training diverge.",
        how="Two epochs of digits, 4 x 16, with and without dividing by 16; medians over three seeds.",
        measure=learning.forgetting,
        numbers={
            "chance": Number("loss of random guessing"),
            "sgd_right": Number("final loss, SGD, correct"),
            "sgd_no_division": Number("final loss, SGD, not divided"),
            "adam_right": Number("final loss, Adam, correct"),
            "adam_no_division": Number("final loss, Adam, not divided"),
        },
        rule=rules.forgetting,
        rule_in_words=(
            "Training has diverged if the final loss is at least 0.95 times the loss of random guessing. True: with "
            "SGD and with Adam. True with a condition: with one of them. False: otherwise."
        ),
        texts={
            "only_if": (
                "Only with SGD and many micro-batches: with sixteen micro-batches of four samples, the loss ends at "
                "{sgd_no_division}, no better than random guessing ({chance}), instead of {sgd_right}; with Adam it "
                "ends at {adam_no_division} instead of {adam_right}. Adam divides by the size of the gradient, so most "
                "of the factor cancels. Clipping and weight decay in the loss are still wrong."
            ),
        },
        seconds=25,
        tolerance=0.1,
    ),
    Claim(
        name="sync_batch_norm",
        side="recipe",
        title="SyncBatchNorm",
        statement="SyncBatchNorm restores the statistics of the whole batch.",
        how="The gradient of 64 shapes in four micro-batches of 16, against the gradient of one pass.",
        measure=equality.sync_batch_norm,
        numbers={
            "plain_error": Number(f"{_ERROR}, BatchNorm", "error"),
            "sync_error": Number("SyncBatchNorm, one rank", "error"),
            "sync_error_2_ranks": Number("SyncBatchNorm, 2 ranks: groups of 32", "error"),
            "sync_error_4_ranks": Number("SyncBatchNorm, 4 ranks: no accumulation", "error", noisy=True),
            "exact_error": Number('anybatch, norms="exact"', "error", noisy=True),
        },
        rule=rules.sync_batch_norm,
        rule_in_words=(
            "True: the error on one rank is below 1e-4. True with a condition: it is below 1e-4 with one rank per "
            "micro-batch. False: otherwise."
        ),
        texts={
            "only_if": (
                "Only if every device runs exactly one micro-batch: PyTorch's SyncBatchNorm averages over devices, but "
                "not over micro-batches that run one after the other, so with four of them on one device the gradient "
                "is still off by {sync_error}. On two ranks the error is "
                "{sync_error_2_ranks}. It disappears ({sync_error_4_ranks}) only without accumulation. The engine's "
                "exact BatchNorm computes the statistics over all micro-batches: {exact_error}."
            ),
        },
        seconds=2,
    ),
)
CLAIMS: Mapping[str, Claim] = MappingProxyType(
    {claim.name: claim for claim in (*_CLAIMS, *DEVICE_CLAIMS, *BATCH_SIZE_CLAIMS)}
)
