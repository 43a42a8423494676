"""The rules from the numbers of a claim to its verdict. The catalogue describes each in words."""
# ruff: noqa: PLR2004 (the catalogue describes the limits in words)

from anybatch_guide.claims.claim import EXACT, WRONG, Numbers, Verdict

RULES = ("none", "linear", "sqrt", "gain")
"""Rules for the learning rate: by batch sizes, and the last one by the noise of the gradient too."""


def less_memory(numbers: Numbers) -> Verdict:
    """Judge: less than nine tenths of the memory."""
    return "true" if numbers["ratio_in_four"] < 0.9 else "false"


def equivalent(numbers: Numbers) -> Verdict:
    """Judge: every error is rounding, or only the first."""
    if numbers["even_error"] > EXACT:
        return "false"
    others = ("uneven_error", "token_error", "batch_norm_error", "dropout_error")
    return "true" if all(numbers[name] < EXACT for name in others) else "only_if"


def on_cpus(numbers: Numbers) -> Verdict:
    """Judge: right and smaller."""
    return "true" if numbers["gradient_error"] < EXACT and numbers["memory_ratio"] < 1 else "false"


def three_lines(numbers: Numbers) -> Verdict:
    """Judge: three lines, and nothing wrong with them."""
    if numbers["changed_lines"] > 3:
        return "false"
    return "only_if" if numbers["findings"] else "true"


def n_times_longer(numbers: Numbers) -> Verdict:
    """Judge: close to N times, against the same samples or against one micro-batch."""
    if numbers["ratio_to_same_samples"] > 0.75 * numbers["accumulation_steps"]:
        return "true"
    return "only_if" if numbers["ratio_to_one_micro_batch"] > 0.5 * numbers["accumulation_steps"] else "false"


def small_micro_batches(numbers: Numbers) -> Verdict:
    """Judge: a fifth slower, at 16 or only at 1."""
    if numbers["ratio_1"] < 1.2:
        return "false"
    return "true" if numbers["ratio_16"] > 1.2 else "only_if"


def larger_is_faster(numbers: Numbers) -> Verdict:
    """Judge: gains that persist, or that vanish."""
    gains = list(numbers.values())
    if gains[0] < 1.1:
        return "false"
    return "only_if" if gains[-1] < gains[0] / 1.5 else "true"


def batch_norm(numbers: Numbers) -> Verdict:
    """Judge: wrong with BatchNorm and right with GroupNorm."""
    if numbers["gradient_error"] < WRONG:
        return "false"
    return "true" if numbers["group_norm_error"] < EXACT else "only_if"


def sync_batch_norm(numbers: Numbers) -> Verdict:
    """Judge: right on one rank, or only with nothing to accumulate."""
    if numbers["sync_error"] < EXACT:
        return "true"
    return "only_if" if numbers["sync_error_4_ranks"] < EXACT else "false"


def stale(numbers: Numbers) -> Verdict:
    """Judge: parameters move, or the gradient is wrong."""
    return "true" if numbers["moved"] > 0 or numbers["gradient_error"] > WRONG else "false"


def not_free(numbers: Numbers) -> Verdict:
    """Judge: a higher peak, and one copy in the forward."""
    if numbers["extra_at_peak"] <= 0:
        return "false"
    return "true" if numbers["extra_in_forward"] >= numbers["weight_bytes"] else "only_if"


def divide_by_n(numbers: Numbers) -> Verdict:
    """Judge: right for equal micro-batches, or for all."""
    if numbers["even_error"] > EXACT:
        return "false"
    return "only_if" if max(numbers["uneven_error"], numbers["token_error"]) > WRONG else "true"


def forgetting(numbers: Numbers) -> Verdict:
    """Judge: no better than chance, with both optimizers or with one."""
    crashes = [numbers[f"{name}_no_division"] >= 0.95 * numbers["chance"] for name in ("sgd", "adam")]
    return "true" if all(crashes) else "only_if" if any(crashes) else "false"


def no_average(numbers: Numbers) -> Verdict:
    """Judge: the sum over ranks is the gradient."""
    return "true" if numbers["sum_error"] < EXACT else "false"


def sampler_overlap(numbers: Numbers) -> Verdict:
    """Judge: never a sample twice, or only where ranks divide the data."""
    if not any(numbers[f"twice_on_{ranks}"] for ranks in (2, 4, 8)):
        return "true"
    return "only_if" if numbers["twice_if_divisible"] == 0 else "false"


def ddp_memory(numbers: Numbers) -> Verdict:
    """Judge: four ranks at least halve the memory of each."""
    return "true" if numbers["ddp_ratio"] < 0.5 else "false"


def data_parallel(numbers: Numbers) -> Verdict:
    """Judge: fewer lines, and hardly slower."""
    if numbers["lines"] > numbers["lines_ddp"]:
        return "false"
    return "true" if numbers["time_ratio"] < 1.1 and numbers["memory_ratio"] < 1.1 else "only_if"


def all_reduce_saves(numbers: Numbers) -> Verdict:
    """Judge whether it is faster than through one rank, and whether a step hides it."""
    if numbers["through_one_ratio"] < 1.2:
        return "false"
    return "true" if numbers["exposed"] < 5 else "only_if"


def linear_to_eight(numbers: Numbers) -> Verdict:
    """Judge: nine tenths of eight times everywhere, or somewhere."""
    linear = [value >= 90 for value in numbers.values()]
    return "true" if all(linear) else "only_if" if any(linear) else "false"


def usual_buckets(numbers: Numbers) -> Verdict:
    """Judge: within 2% of the best everywhere, or within 10%."""
    worst = min(numbers["most_lost_at_25"], numbers["most_lost_at_50"])
    return "true" if worst < 2 else "only_if" if worst < 10 else "false"


def larger_batch(numbers: Numbers) -> Verdict:
    """Judge: no more samples than the smallest batch needs, or at least fewer steps."""
    sizes = (64, 256)
    if any(numbers[f"steps_{size}"] >= numbers["steps_16"] for size in sizes):
        return "false"
    return "true" if all(numbers[f"samples_{size}"] <= 1.1 * numbers["samples_16"] for size in sizes) else "only_if"


def one_rule(numbers: Numbers) -> Verdict:
    """Judge: a rule of batch sizes within a quarter of the best loss everywhere, or only one that uses the noise."""
    worst = {rule: max(value for name, value in numbers.items() if name.startswith(rule)) for rule in RULES}
    if min(worst[rule] for rule in RULES if rule != "gain") <= 1.25:
        return "true"
    return "only_if" if worst["gain"] <= 1.25 else "false"


def less_noise(numbers: Numbers) -> Verdict:
    """Judge: less noise, and a lower loss after the same samples, or only after the same steps."""
    if numbers["noise_ratio"] > 1.25 or numbers["loss_same_steps"] >= numbers["loss_small"]:
        return "false"
    return "true" if numbers["loss_same_samples"] < numbers["loss_small"] else "only_if"


def sharp(numbers: Numbers) -> Verdict:
    """Judge: a quarter sharper at any rate, or only at an unscaled rate."""
    sharper = {
        name: numbers[f"eigenvalue_{name}"] > 1.25 * numbers["eigenvalue_base"]
        for name in ("same_rate", "scaled_rate", "scaled_rate_same_steps")
    }
    if not sharper["same_rate"]:
        return "false"
    return "true" if all(sharper.values()) else "only_if"


def shards_travel(numbers: Numbers) -> Verdict:
    """Judge: eight micro-batches gather the same bytes as one, in any order or only in one."""
    if numbers["by_micro_batch"] < 1.1:
        return "true"
    return "only_if" if numbers["by_layer"] < 1.1 else "false"
