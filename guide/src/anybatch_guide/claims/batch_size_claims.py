"""Common claims about batch size."""

from anybatch_guide.claims import batch_size, rules
from anybatch_guide.claims.claim import Claim, Number

_RULES = {"none": "the rate kept", "linear": "linear", "sqrt": "square root", "gain": "gain of the noise"}
_CASES = {"digits_sgd": "digits, SGD", "digits_adamw": "digits, AdamW", "text_sgd": "text, SGD"}

BATCH_SIZE_CLAIMS = (
    Claim(
        name="larger_batch",
        side="batch_size",
        title="A larger batch",
        said="Training is faster with a larger batch.",
        how=(
            "A small network on digits, by SGD, until the held-out loss is 0.3, each batch size at the best of three "
            "rates; means over two seeds. Time is the processor's, on one thread."
        ),
        measure=batch_size.larger_batch,
        numbers={
            **{f"steps_{size}": Number(f"steps, batches of {size}") for size in (16, 64, 256)},
            **{f"samples_{size}": Number(f"samples, batches of {size}") for size in (16, 64, 256)},
            **{f"time_{size}": Number(f"time, batches of {size}, against 16", "x", noisy=True) for size in (64, 256)},
            "time_accumulated": Number("time, batches of 16 x 16, against 16", "x", noisy=True),
        },
        rule=rules.larger_batch,
        rule_in_words=(
            "False if a larger batch does not take fewer steps; true if none takes over a tenth more samples than the "
            "smallest; else true only if the samples of a step cost less together."
        ),
        texts={
            "true": "Batches of 256 take {steps_256} steps instead of {steps_16}, and no more samples.",
            "only_if": (
                "Steps fall from {steps_16} with batches of 16 to {steps_64} and {steps_256}, and samples rise from "
                "{samples_16} to {samples_64} and {samples_256}. So it is faster only if the samples of a step cost "
                "less together: on more devices, or where a step or micro-batch costs much beside its samples, as with "
                "this small network on one thread. There batches of 64 take {time_64} and of 256 {time_256} the time, "
                "at once; accumulated in micro-batches of 16, those of 256 take {time_accumulated}."
            ),
            "false": "Batches of 256 take {steps_256} steps, and those of 16 {steps_16}.",
        },
        seconds=25,
        tolerance=0.1,
    ),
    Claim(
        name="one_rule",
        side="batch_size",
        title="One rule",
        said="One rule carries the learning rate to any batch size.",
        how=(
            "The best rate at the smallest batch, carried by each rule to batches up to 64 times as large: the "
            "held-out loss as a multiple of that of the best rate there. Digits with SGD and AdamW, text with SGD."
        ),
        measure=batch_size.one_rule,
        numbers={
            f"{rule}_{case}": Number(f"{words}, {where}: worst", "x")
            for case, where in _CASES.items()
            for rule, words in _RULES.items()
        },
        rule=rules.one_rule,
        rule_in_words=(
            "True if the rate kept, linear scaling or the square root is within 1.25 times the best loss in all three "
            "cases; true only if none of them is and the gain of the noise is; else false."
        ),
        texts={
            "true": (
                "At worst the loss is {linear_digits_sgd}, {linear_digits_adamw} and {linear_text_sgd} that of the "
                "best rate by linear scaling, and {sqrt_digits_sgd}, {sqrt_digits_adamw} and {sqrt_text_sgd} by the "
                "square root."
            ),
            "only_if": (
                "Only if the rule knows more than batch sizes. On digits with SGD, digits with AdamW and text with SGD "
                "the loss is at worst {linear_digits_sgd}, {linear_digits_adamw} and {linear_text_sgd} that of the "
                "best rate by linear scaling, {sqrt_digits_sgd}, {sqrt_digits_adamw} and {sqrt_text_sgd} by the square "
                "root, and {none_digits_sgd}, {none_digits_adamw} and {none_text_sgd} if the rate is kept. By the gain "
                "of the noise, measured in the middle of a run, it is {gain_digits_sgd}, {gain_digits_adamw} and "
                "{gain_text_sgd}; the study of more sizes and seeds has found sizes where it fails, too."
            ),
            "false": (
                "Somewhere every rule fails. At worst the loss is {linear_digits_sgd}, {linear_digits_adamw} and "
                "{linear_text_sgd} that of the best rate by linear scaling, {sqrt_digits_sgd}, {sqrt_digits_adamw} and "
                "{sqrt_text_sgd} by the square root, {none_digits_sgd}, {none_digits_adamw} and {none_text_sgd} if the "
                "rate is kept, and {gain_digits_sgd}, {gain_digits_adamw} and {gain_text_sgd} by the gain of the noise."
            ),
        },
        seconds=150,
        tolerance=0.1,
        runs_here=False,
    ),
    Claim(
        name="less_noise",
        side="batch_size",
        title="Less noise",
        said="A larger batch has less noise, so it converges better.",
        how=(
            "Variance of gradients of 16 and 128 digits; held-out losses behind four epochs of both, and behind as "
            "many steps, each at the best of three rates; means over two seeds."
        ),
        measure=batch_size.less_noise,
        numbers={
            "noise_ratio": Number("variance of 128 against an eighth of that of 16", "x"),
            "loss_small": Number("held-out loss, batches of 16"),
            "loss_same_samples": Number("batches of 128, as many samples"),
            "loss_same_steps": Number("batches of 128, as many steps"),
        },
        rule=rules.less_noise,
        rule_in_words=(
            "False if the variance does not fall to an eighth, within a quarter of that, or the loss is not lower "
            "after as many steps; true if it is lower after as many samples, too; else true only if steps are counted."
        ),
        texts={
            "true": "The loss is {loss_same_samples} instead of {loss_small} after as many samples.",
            "only_if": (
                "There is less noise: {noise_ratio} an eighth of it. But it converges better only if steps are "
                "counted: after as many steps, which is eight times the samples, the held-out loss is "
                "{loss_same_steps} instead of {loss_small}; after as many samples it is {loss_same_samples}."
            ),
            "false": "The variance is {noise_ratio} an eighth; the loss {loss_same_steps} instead of {loss_small}.",
        },
        seconds=30,
        tolerance=0.1,
    ),
    Claim(
        name="sharp",
        side="batch_size",
        title="Sharp minima",
        said="Larger batches end in sharp minima, which generalise worse.",
        how=(
            "The largest eigenvalue of the Hessian over all digits that were trained on, and held-out accuracy, by SGD "
            "with batches of 16 and 256; means over two seeds."
        ),
        measure=batch_size.sharp,
        numbers={
            f"{number}_{way}": Number(f"{words}, {what}", unit)
            for way, what in {
                "base": "batches of 16",
                "same_rate": "256 at the same rate",
                "scaled_rate": "256 at the scaled rate",
                "scaled_rate_same_steps": "256 at the scaled rate, as many steps",
            }.items()
            for number, words, unit in (("eigenvalue", "largest eigenvalue", ""), ("accuracy", "accuracy", "%"))
        },
        rule=rules.sharp,
        rule_in_words=(
            "True if the eigenvalue is over a quarter larger at the same rate, at the scaled one, and after as many "
            "steps; false if it is not even at the same rate; else true only if."
        ),
        texts={
            "true": (
                "The eigenvalue goes from {eigenvalue_base} to {eigenvalue_same_rate} at the same rate, to "
                "{eigenvalue_scaled_rate} at the scaled one, and to {eigenvalue_scaled_rate_same_steps} after as many "
                "steps."
            ),
            "only_if": (
                "Only if the run is not as far: at the same rate the eigenvalue goes from {eigenvalue_base} to "
                "{eigenvalue_same_rate}, and the accuracy from {accuracy_base} to {accuracy_same_rate}. With the rate "
                "scaled it is {eigenvalue_scaled_rate} ({accuracy_scaled_rate}), and after as many steps, on more "
                "samples, {eigenvalue_scaled_rate_same_steps} ({accuracy_scaled_rate_same_steps}). It follows the "
                "rate and the progress of a run more than the size of its batch."
            ),
            "false": "At the same rate the eigenvalue goes from {eigenvalue_base} to {eigenvalue_same_rate}.",
        },
        seconds=45,
        tolerance=0.1,
    ),
)
