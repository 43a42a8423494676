"""The rules from the numbers of a claim to its verdict. The catalogue describes each in words."""
# ruff: noqa: PLR2004 (the catalogue describes the limits in words)

from anybatch_guide.claims.claim import EXACT, WRONG, Numbers, Verdict

RULES = ("none", "linear", "sqrt", "gain")
"""Rules for the learning rate: by batch sizes, and the last one by the noise of the gradient too."""


def less_memory(found: Numbers) -> Verdict:
    """Judge: less than nine tenths of the memory."""
    return "true" if found["ratio_in_four"] < 0.9 else "false"


def equivalent(found: Numbers) -> Verdict:
    """Judge: every error is rounding, or only the first."""
    if found["even_error"] > EXACT:
        return "false"
    others = ("uneven_error", "token_error", "batch_norm_error", "dropout_error")
    return "true" if all(found[name] < EXACT for name in others) else "only_if"


def on_cpus(found: Numbers) -> Verdict:
    """Judge: right and smaller."""
    return "true" if found["gradient_error"] < EXACT and found["memory_ratio"] < 1 else "false"


def three_lines(found: Numbers) -> Verdict:
    """Judge: three lines, and nothing wrong with them."""
    if found["changed_lines"] > 3:
        return "false"
    return "only_if" if found["findings"] else "true"


def n_times_longer(found: Numbers) -> Verdict:
    """Judge: close to N times, against the same samples or against one micro-batch."""
    if found["ratio_to_same_samples"] > 0.75 * found["accumulation_steps"]:
        return "true"
    return "only_if" if found["ratio_to_one_micro_batch"] > 0.5 * found["accumulation_steps"] else "false"


def small_micro_batches(found: Numbers) -> Verdict:
    """Judge: a fifth slower, at 16 or only at 1."""
    if found["ratio_1"] < 1.2:
        return "false"
    return "true" if found["ratio_16"] > 1.2 else "only_if"


def larger_is_faster(found: Numbers) -> Verdict:
    """Judge: gains that persist, or that vanish."""
    gains = list(found.values())
    if gains[0] < 1.1:
        return "false"
    return "only_if" if gains[-1] < gains[0] / 1.5 else "true"


def batch_norm(found: Numbers) -> Verdict:
    """Judge: wrong with BatchNorm and right with GroupNorm."""
    if found["gradient_error"] < WRONG:
        return "false"
    return "true" if found["group_norm_error"] < EXACT else "only_if"


def sync_batch_norm(found: Numbers) -> Verdict:
    """Judge: right on one rank, or only with nothing to accumulate."""
    if found["sync_error"] < EXACT:
        return "true"
    return "only_if" if found["sync_error_4_ranks"] < EXACT else "false"


def stale(found: Numbers) -> Verdict:
    """Judge: parameters move, or the gradient is wrong."""
    return "true" if found["moved"] > 0 or found["gradient_error"] > WRONG else "false"


def not_free(found: Numbers) -> Verdict:
    """Judge: a higher peak, and one copy in the forward."""
    if found["extra_at_peak"] <= 0:
        return "false"
    return "true" if found["extra_in_forward"] >= found["weight_bytes"] else "only_if"


def divide_by_n(found: Numbers) -> Verdict:
    """Judge: right for equal micro-batches, or for all."""
    if found["even_error"] > EXACT:
        return "false"
    return "only_if" if max(found["uneven_error"], found["token_error"]) > WRONG else "true"


def forgetting(found: Numbers) -> Verdict:
    """Judge: no better than chance, with both optimizers or with one."""
    crashes = [found[f"{name}_no_division"] >= 0.95 * found["chance"] for name in ("sgd", "adam")]
    return "true" if all(crashes) else "only_if" if any(crashes) else "false"


def no_average(found: Numbers) -> Verdict:
    """Judge: the sum over ranks is the gradient."""
    return "true" if found["sum_error"] < EXACT else "false"


def sampler_overlap(found: Numbers) -> Verdict:
    """Judge: never a sample twice, or only where ranks divide the data."""
    if not any(found[f"twice_on_{ranks}"] for ranks in (2, 4, 8)):
        return "true"
    return "only_if" if found["twice_if_divisible"] == 0 else "false"


def ddp_memory(found: Numbers) -> Verdict:
    """Judge: four ranks at least halve the memory of each."""
    return "true" if found["ddp_ratio"] < 0.5 else "false"


def data_parallel(found: Numbers) -> Verdict:
    """Judge: fewer lines, and hardly slower."""
    if found["lines"] > found["lines_ddp"]:
        return "false"
    return "true" if found["time_ratio"] < 1.1 and found["memory_ratio"] < 1.1 else "only_if"


def all_reduce_saves(found: Numbers) -> Verdict:
    """Judge: faster than through one rank, and hidden in a step or not."""
    if found["through_one_ratio"] < 1.2:
        return "false"
    return "true" if found["exposed"] < 5 else "only_if"


def linear_to_eight(found: Numbers) -> Verdict:
    """Judge: nine tenths of eight times everywhere, or somewhere."""
    linear = [value >= 90 for value in found.values()]
    return "true" if all(linear) else "only_if" if any(linear) else "false"


def usual_buckets(found: Numbers) -> Verdict:
    """Judge: within 2% of the best everywhere, or within 10%."""
    worst = min(found["most_lost_at_25"], found["most_lost_at_50"])
    return "true" if worst < 2 else "only_if" if worst < 10 else "false"


def larger_batch(found: Numbers) -> Verdict:
    """Judge: no more samples than the smallest batch needs, or at least fewer steps."""
    sizes = (64, 256)
    if any(found[f"steps_{size}"] >= found["steps_16"] for size in sizes):
        return "false"
    return "true" if all(found[f"samples_{size}"] <= 1.1 * found["samples_16"] for size in sizes) else "only_if"


def one_rule(found: Numbers) -> Verdict:
    """Judge: a rule of batch sizes within a quarter of the best loss everywhere, or only one that uses the noise."""
    worst = {rule: max(value for name, value in found.items() if name.startswith(rule)) for rule in RULES}
    if min(worst[rule] for rule in RULES if rule != "gain") <= 1.25:
        return "true"
    return "only_if" if worst["gain"] <= 1.25 else "false"


def less_noise(found: Numbers) -> Verdict:
    """Judge: less noise, and a lower loss after the same samples, or only after the same steps."""
    if found["noise_ratio"] > 1.25 or found["loss_same_steps"] >= found["loss_small"]:
        return "false"
    return "true" if found["loss_same_samples"] < found["loss_small"] else "only_if"


def sharp(found: Numbers) -> Verdict:
    """Judge: a quarter sharper at any rate, or only at an unscaled rate."""
    sharper = {
        name: found[f"eigenvalue_{name}"] > 1.25 * found["eigenvalue_base"]
        for name in ("same_rate", "scaled_rate", "scaled_rate_same_steps")
    }
    if not sharper["same_rate"]:
        return "false"
    return "true" if all(sharper.values()) else "only_if"


def shards_travel(found: Numbers) -> Verdict:
    """Judge: eight micro-batches gather the same bytes as one, in any order or only in one."""
    if found["by_micro_batch"] < 1.1:
        return "true"
    return "only_if" if found["by_layer"] < 1.1 else "false"
