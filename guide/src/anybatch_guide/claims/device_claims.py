"""Common claims about training on several devices."""

from anybatch_guide.claims import devices, rules
from anybatch_guide.claims.claim import Claim, Number

DEVICE_CLAIMS = (
    Claim(
        name="all_reduce_saves",
        side="devices",
        title="All-reduce",
        statement="All-reduce avoids the overhead of gathering all gradients on one device.",
        how=(
            "Four ranks sum 8 MiB by all-reduce and through rank 0, interleaved. Two ranks make steps on digits with "
            "and without a reduction."
        ),
        measure=devices.all_reduce_saves,
        numbers={
            "through_one_ratio": Number("time through one rank / time of all-reduce", "x", noisy=True),
            "exposed": Number("exposed reduction, share of a small step", "%", noisy=True),
            "exposed_accumulated": Number("the same with four micro-batches", "%", noisy=True),
        },
        rule=rules.all_reduce_saves,
        rule_in_words=(
            "False: sums through one rank take less than 1.2 times as long. True only if: they take longer, but "
            "exposed reduction is at least 5% of a step. True: otherwise."
        ),
        texts={
            "true": "Through one rank it takes {through_one_ratio} as long, and only {exposed} of a step is exposed.",
            "only_if": (
                "Through one rank it takes {through_one_ratio} as long, so all-reduce avoids that overhead. But it is "
                "not free: it takes {exposed} of a step here, and {exposed_accumulated} with four micro-batches."
            ),
            "false": "Through one rank it takes only {through_one_ratio} as long.",
        },
        seconds=60,
        runs_here=False,
    ),
    Claim(
        name="no_average",
        side="devices",
        title="No average",
        statement="After all-reduce, no averaging is needed.",
        how="Gradients of 64 digits on two ranks: summed, averaged by DDP, and by the engine; against one pass.",
        measure=devices.no_average,
        numbers={
            "sum_error": Number("relative error, sum of two ranks' mean gradients"),
            "average_error": Number("DDP's average, 32 + 32 samples", noisy=True),
            "uneven_average_error": Number("DDP's average, 44 + 20 samples"),
            "uneven_engine_error": Number("the engine, 44 + 20 samples", noisy=True),
        },
        rule=rules.no_average,
        rule_in_words="True: the error of the sum is below 1e-4. False: otherwise.",
        texts={
            "true": "The sum over ranks is the gradient, with an error of {sum_error}.",
            "false": (
                "If each rank computes the gradient of its mean loss, the sum is too large by the number of ranks: its "
                "error is {sum_error}. DDP divides by the number of ranks, which is correct for equal shares "
                "({average_error}), but not for others ({uneven_average_error}). Dividing once, by the number of "
                "samples in the whole batch, is correct for both ({uneven_engine_error})."
            ),
        },
        seconds=10,
        runs_here=False,
    ),
    Claim(
        name="sampler_overlap",
        side="devices",
        title="DistributedSampler",
        statement="DistributedSampler gives every rank different samples, without overlap.",
        how="The indices of one epoch of digits from torch's DistributedSampler with default arguments.",
        measure=devices.sampler_overlap,
        numbers={
            "samples": Number("samples in the data set"),
            "twice_on_2": Number("repeated samples, 2 ranks"),
            "twice_on_4": Number("repeated samples, 4 ranks"),
            "twice_on_8": Number("repeated samples, 8 ranks"),
            "twice_if_divisible": Number("repeated samples, 8 ranks, divisible data set"),
        },
        rule=rules.sampler_overlap,
        rule_in_words=(
            "True: no sample is repeated. True only if: none is repeated if the number of samples is divisible by the "
            "number of ranks. False: otherwise."
        ),
        texts={
            "true": "None of the {samples} samples is repeated.",
            "only_if": (
                "Only if the number of samples is divisible by the number of ranks ({twice_if_divisible} repeated). "
                "Otherwise the sampler repeats samples from the start: on two, four and eight ranks {twice_on_2}, "
                "{twice_on_4} and {twice_on_8} of {samples} samples count twice, in training and in metrics."
            ),
            "false": "Even if the data set is divisible by the number of ranks, {twice_if_divisible} are repeated.",
        },
        seconds=2,
    ),
    Claim(
        name="data_parallel",
        side="devices",
        title="DataParallel",
        statement="DataParallel is simple and good enough.",
        how="The changed lines of a plain loop; steps of 256 digits on two CPU devices, interleaved with DDP.",
        measure=devices.data_parallel,
        numbers={
            "lines": Number("changed lines, DataParallel", "lines"),
            "lines_ddp": Number("changed lines, DDP", "lines"),
            "time_ratio": Number("time of a step / with DDP", "x", noisy=True),
            "memory_ratio": Number("peak of its process / peak of a DDP rank", "x"),
        },
        rule=rules.data_parallel,
        rule_in_words=(
            "False: it changes more lines than DDP. True: it does not, and takes less than 1.1 times the time and "
            "memory. True only if: otherwise."
        ),
        texts={
            "true": "It changes {lines} lines, not {lines_ddp}, with {time_ratio} the time and {memory_ratio} memory.",
            "only_if": (
                "It changes {lines} lines; DDP changes {lines_ddp} and needs a launcher. Here, on CPU threads, a step "
                "takes {time_ratio} the time of a step with DDP, and the process needs {memory_ratio} the memory of a "
                "DDP rank: DataParallel copies the model in every step, and gathers outputs and loss on one device. "
                "It is good enough only if time and memory do not matter."
            ),
            "false": "It changes {lines} lines, and DDP changes {lines_ddp}.",
        },
        seconds=40,
        runs_here=False,
    ),
    Claim(
        name="ddp_memory",
        side="devices",
        title="Memory of DDP",
        statement="DDP uses the memory of several devices efficiently.",
        how="All tensors that the engine keeps between steps, on each of four ranks.",
        measure=devices.ddp_memory,
        numbers={
            "alone_bytes": Number("weights and optimizer states on one device", "bytes"),
            "ddp_bytes": Number("on each of four ranks, DDP", "bytes"),
            "ddp_ratio": Number("DDP / one device"),
            "fsdp_ratio": Number("FSDP / one device"),
        },
        rule=rules.ddp_memory,
        rule_in_words="True: each of four ranks holds less than half the bytes of one device. False: otherwise.",
        texts={
            "true": "Each of four ranks holds {ddp_ratio} of the bytes of one device.",
            "false": (
                "DDP divides only the activations among ranks. Each of four ranks keeps {ddp_bytes} of weights and "
                "optimizer states, which is {ddp_ratio} of the bytes on one device. With FSDP, which shards them, it "
                "is {fsdp_ratio}."
            ),
        },
        seconds=20,
        runs_here=False,
    ),
    Claim(
        name="shards_travel",
        side="devices",
        title="Traffic of sharded weights",
        statement="With sharded weights, more micro-batches do not increase the traffic.",
        how=(
            "One step in plain PyTorch on two ranks, which gather each of four blocks before they use it. With one and "
            "eight micro-batches, which pass each block one after the other or together."
        ),
        measure=devices.shards_travel,
        numbers={
            "by_micro_batch": Number("bytes gathered, 8 micro-batches / 1, one after the other", "x"),
            "by_layer": Number("bytes gathered, 8 micro-batches / 1, layer by layer", "x"),
            "kept_by_micro_batch": Number("outputs kept between layers, one after the other", "bytes"),
            "kept_by_layer": Number("outputs kept between layers, layer by layer", "bytes"),
            "waiting_by_micro_batch": Number("full gradients, one after the other", "bytes"),
            "waiting_by_layer": Number("full gradients, layer by layer", "bytes"),
            "gradient_error": Number("largest error of a gradient, float64", noisy=True),
        },
        rule=rules.shards_travel,
        rule_in_words=(
            "True: eight micro-batches gather less than 1.1 times the bytes of one. True only if: they do so layer by "
            "layer. False: otherwise."
        ),
        texts={
            "true": "Eight micro-batches gather {by_micro_batch} the bytes of one.",
            "only_if": (
                "Only if each layer runs all micro-batches before the next layer starts. Then eight micro-batches "
                "gather {by_layer} the bytes of one; if they run one after the other, {by_micro_batch}. But layer by "
                "layer needs more memory: {kept_by_layer} of outputs between layers instead of {kept_by_micro_batch}, "
                "and {waiting_by_layer} of full gradients instead of {waiting_by_micro_batch}."
            ),
            "false": "Even layer by layer, eight micro-batches gather {by_layer} the bytes of one.",
        },
        seconds=10,
        runs_here=False,
    ),
    Claim(
        name="linear_to_eight",
        side="devices",
        title="Linear up to eight",
        statement="Data parallelism scales linearly up to eight devices.",
        how=(
            "Forecast, not measured: a residual network of 50 layers, micro-batches of 32 images on each device, one "
            "or eight of them, on eight devices in one host or on eight hosts."
        ),
        measure=devices.linear_to_eight,
        numbers={
            "in_one_host": Number("efficiency, 8 devices in one host", "%"),
            "in_one_host_accumulated": Number("the same with eight micro-batches", "%"),
            "at_10_gbit": Number("efficiency, 8 hosts, 10 Gbit/s", "%"),
            "at_10_gbit_accumulated": Number("the same with eight micro-batches", "%"),
            "at_1_gbit": Number("efficiency, 8 hosts, 1 Gbit/s", "%"),
            "at_1_gbit_accumulated": Number("the same with eight micro-batches", "%"),
        },
        rule=rules.linear_to_eight,
        rule_in_words="True: every efficiency is at least 90%. True only if: some are. False: none is.",
        texts={
            "true": "The efficiency is {in_one_host} in one host, and still {at_1_gbit} at 1 Gbit/s.",
            "only_if": (
                "The efficiency depends on the link, not on the number eight: {in_one_host} in one host, "
                "{at_10_gbit} on hosts at 10 Gbit/s, and {at_1_gbit} at 1 Gbit/s. With eight micro-batches per "
                "reduction, the last two are {at_10_gbit_accumulated} and {at_1_gbit_accumulated}."
            ),
            "false": "Even in one host, the efficiency is only {in_one_host}.",
        },
        seconds=2,
    ),
    Claim(
        name="usual_buckets",
        side="devices",
        title="Buckets",
        statement="Gradient buckets of 25 to 50 MB are best.",
        how=(
            "Forecast, not measured: steps on eight hosts with 102 MB and 1 GB of gradients, at 1, 10 and 100 Gbit/s, "
            "with buckets of 1 to 400 MiB."
        ),
        measure=devices.usual_buckets,
        numbers={
            "most_lost_at_25": Number("largest loss of 25 MiB against the best size", "%"),
            "most_lost_at_50": Number("largest loss of 50 MiB against the best size", "%"),
            "least": Number("smallest of the best sizes, MiB"),
            "most": Number("largest of the best sizes, MiB"),
        },
        rule=rules.usual_buckets,
        rule_in_words=(
            "True: 25 or 50 MiB are always less than 2% slower than the best size. True only if: less than 10% slower. "
            "False: otherwise."
        ),
        texts={
            "true": (
                "Buckets of 25 and 50 MiB are at most {most_lost_at_25} and {most_lost_at_50} slower than the best "
                "size. But the best size is between {least} and {most} MiB, depending on link and model: they are a "
                "good default, not always the best."
            ),
            "only_if": (
                "Buckets of 25 and 50 MiB are at most {most_lost_at_25} and {most_lost_at_50} slower than the best "
                "size, which is between {least} and {most} MiB, depending on link and model. `anybatch scale` "
                "measures it."
            ),
            "false": (
                "Buckets of 25 and 50 MiB are up to {most_lost_at_25} and {most_lost_at_50} slower than the best size, "
                "which is between {least} and {most} MiB, depending on link and model. `anybatch scale` measures it."
            ),
        },
        seconds=2,
    ),
)
