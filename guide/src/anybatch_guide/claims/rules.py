"""The rules that judge a claim by its numbers: "true", "only_if" or "false". The catalogue describes each in words."""
# ruff: noqa: PLR2004 (the catalogue describes the limits in words)

from anybatch_guide.claims.claim import EXACT, WRONG, Numbers, Verdict

RULES = ("none", "linear", "sqrt", "gain")
"""Scaling rules for the learning rate: three use only the batch sizes, "gain" also the gradient noise."""


def less_memory(numbers: Numbers) -> Verdict:
    """Judge whether four micro-batches need less than 90% of the memory of one pass."""
    return "true" if numbers["ratio_in_four"] < 0.9 else "false"


def equivalent(numbers: Numbers) -> Verdict:
    """Judge whether every gradient error is rounding, or only the error of equal micro-batches."""
    if numbers["even_error"] > EXACT:
        return "false"
    others = ("uneven_error", "token_error", "batch_norm_error", "dropout_error")
    return "true" if all(numbers[name] < EXACT for name in others) else "only_if"


def contrastive(numbers: Numbers) -> Verdict:
    """Judge whether the gradient of plain accumulation is correct, or only the gradient of two passes."""
    if numbers["plain_error"] < EXACT:
        return "true"
    return "only_if" if numbers["joint_error"] < EXACT else "false"


def on_cpus(numbers: Numbers) -> Verdict:
    """Judge whether the gradient is correct on this CPU and needs less memory (no proof for others)."""
    return "only_if" if numbers["gradient_error"] < EXACT and numbers["memory_ratio"] < 1 else "false"


def three_lines(numbers: Numbers) -> Verdict:
    """Judge whether at most three lines change, and whether the checker finds mistakes in them."""
    if numbers["changed_lines"] > 3:
        return "false"
    return "only_if" if numbers["findings"] else "true"


def n_times_longer(numbers: Numbers) -> Verdict:
    """Judge whether a step takes about N times as long as the same samples in one pass, or as one micro-batch."""
    if numbers["ratio_to_same_samples"] > 0.75 * numbers["accumulation_steps"]:
        return "true"
    return "only_if" if numbers["ratio_to_one_micro_batch"] > 0.5 * numbers["accumulation_steps"] else "false"


def small_micro_batches(numbers: Numbers) -> Verdict:
    """Judge whether single samples are at least a fifth slower than one pass (no proof for other networks)."""
    return "false" if numbers["ratio_1"] < 1.2 else "only_if"


def larger_is_faster(numbers: Numbers) -> Verdict:
    """Judge whether larger micro-batches are faster at all sizes, or only at small ones."""
    gains = list(numbers.values())
    if gains[0] < 1.1:
        return "false"
    return "only_if" if gains[-1] < gains[0] / 1.5 else "true"


def batch_norm(numbers: Numbers) -> Verdict:
    """Judge whether the gradient is wrong with BatchNorm and correct with GroupNorm."""
    if numbers["gradient_error"] < WRONG:
        return "false"
    return "true" if numbers["group_norm_error"] < EXACT else "only_if"


def sync_batch_norm(numbers: Numbers) -> Verdict:
    """Judge whether the gradient is correct on one rank, or only without accumulation."""
    if numbers["sync_error"] < EXACT:
        return "true"
    return "only_if" if numbers["sync_error_4_ranks"] < EXACT else "false"


def stale(numbers: Numbers) -> Verdict:
    """Judge whether parameters change within a window, or the gradient is wrong."""
    return "true" if numbers["moved"] > 0 or numbers["gradient_error"] > WRONG else "false"


def not_free(numbers: Numbers) -> Verdict:
    """Judge whether the peak is higher, by a copy of all gradients that is in memory during a forward."""
    if numbers["extra_at_peak"] <= 0:
        return "false"
    return "true" if numbers["extra_in_forward"] >= numbers["weight_bytes"] else "only_if"


def divide_by_n(numbers: Numbers) -> Verdict:
    """Judge whether dividing by N is correct for all micro-batches, or only for equal ones."""
    if numbers["even_error"] > EXACT:
        return "false"
    return "only_if" if max(numbers["uneven_error"], numbers["token_error"]) > WRONG else "true"


def forgetting(numbers: Numbers) -> Verdict:
    """Judge whether the final loss is no better than random guessing, with both optimizers or with one."""
    crashes = [numbers[f"{name}_no_division"] >= 0.95 * numbers["chance"] for name in ("sgd", "adam")]
    return "true" if all(crashes) else "only_if" if any(crashes) else "false"


def no_average(numbers: Numbers) -> Verdict:
    """Judge whether the sum over ranks is the gradient of all samples."""
    return "true" if numbers["sum_error"] < EXACT else "false"


def sampler_overlap(numbers: Numbers) -> Verdict:
    """Judge whether no sample is repeated, at all numbers of ranks or only if they divide the number of samples."""
    if not any(numbers[f"twice_on_{ranks}"] for ranks in (2, 4, 8)):
        return "true"
    return "only_if" if numbers["twice_if_divisible"] == 0 else "false"


def ddp_memory(numbers: Numbers) -> Verdict:
    """Judge whether each of four ranks needs less than half of the memory of one device."""
    return "true" if numbers["ddp_ratio"] < 0.5 else "false"


def data_parallel(numbers: Numbers) -> Verdict:
    """Judge whether DataParallel changes no more lines than DDP, in about the same time and memory."""
    if numbers["lines"] > numbers["lines_ddp"]:
        return "false"
    return "true" if numbers["time_ratio"] < 1.1 and numbers["memory_ratio"] < 1.1 else "only_if"


def all_reduce_saves(numbers: Numbers) -> Verdict:
    """Judge whether all-reduce is faster than a sum on one rank, and whether computation hides it."""
    if numbers["through_one_ratio"] < 1.2:
        return "false"
    return "true" if numbers["exposed"] < 5 else "only_if"


def linear_to_eight(numbers: Numbers) -> Verdict:
    """Judge whether the efficiency of eight devices is at least 90% on all networks, or on some."""
    linear = [value >= 90 for value in numbers.values()]
    return "true" if all(linear) else "only_if" if any(linear) else "false"


def usual_buckets(numbers: Numbers) -> Verdict:
    """Judge whether one of the usual bucket sizes is always within 2% of the best size, or within 10%."""
    worst = min(numbers["most_lost_at_25"], numbers["most_lost_at_50"])
    return "true" if worst < 2 else "only_if" if worst < 10 else "false"


def larger_batch(numbers: Numbers) -> Verdict:
    """Judge whether larger batches need no more samples than the smallest batch, or only fewer steps."""
    sizes = (64, 256)
    if any(numbers[f"steps_{size}"] >= numbers["steps_16"] for size in sizes):
        return "false"
    return "true" if all(numbers[f"samples_{size}"] <= 1.1 * numbers["samples_16"] for size in sizes) else "only_if"


def one_rule(numbers: Numbers) -> Verdict:
    """Judge whether a rule without gradient noise is always within 1.25 times the best loss, or only "gain" is."""
    worst = {rule: max(value for name, value in numbers.items() if name.startswith(rule)) for rule in RULES}
    if min(worst[rule] for rule in RULES if rule != "gain") <= 1.25:
        return "true"
    return "only_if" if worst["gain"] <= 1.25 else "false"


def less_noise(numbers: Numbers) -> Verdict:
    """Judge whether noise falls as expected, and the loss is lower after the same samples, or only the same steps."""
    if numbers["noise_ratio"] > 1.25 or numbers["loss_same_steps"] >= numbers["loss_small"]:
        return "false"
    return "true" if numbers["loss_same_samples"] < numbers["loss_small"] else "only_if"


def sharp(numbers: Numbers) -> Verdict:
    """Judge whether minima of large batches are sharper at every learning rate, or only at the unscaled one."""
    sharper = {
        name: numbers[f"eigenvalue_{name}"] > 1.25 * numbers["eigenvalue_base"]
        for name in ("same_rate", "scaled_rate", "scaled_rate_same_steps")
    }
    if not sharper["same_rate"]:
        return "false"
    return "true" if all(sharper.values()) else "only_if"


def shards_travel(numbers: Numbers) -> Verdict:
    """Judge whether eight micro-batches gather about the same bytes as one, in any order or only layer by layer."""
    if numbers["by_micro_batch"] < 1.1:
        return "true"
    return "only_if" if numbers["by_layer"] < 1.1 else "false"
