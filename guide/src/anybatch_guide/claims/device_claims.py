"""Claims about training on several devices, as they are often made."""

from anybatch_guide.claims import devices, rules
from anybatch_guide.claims.claim import Claim, Number

DEVICE_CLAIMS = (
    Claim(
        name="all_reduce_saves",
        side="devices",
        title="All-reduce",
        said="All-reduce saves the overhead of gathering gradients on one device.",
        how=(
            "Four ranks sum 8 MiB by all-reduce, and through rank 0, in turns; two ranks make steps on digits with a "
            "reduction and without."
        ),
        measure=devices.all_reduce_saves,
        numbers={
            "through_one_ratio": Number("time through one rank, as a multiple of all-reduce", "x", noisy=True),
            "exposed": Number("part of a small step that reduction adds", "%", noisy=True),
            "exposed_accumulated": Number("the same with four micro-batches", "%", noisy=True),
        },
        rule=rules.all_reduce_saves,
        rule_in_words=(
            "False if sums through one rank take less than 1.2 times as long; true only if they take longer and "
            "reduction still adds more than 5% to a step; else true."
        ),
        texts={
            "true": "Through one rank it takes {through_one_ratio} as long, and a step hides the rest ({exposed}).",
            "only_if": (
                "Through one rank it takes {through_one_ratio} as long, so that overhead is saved. What is left is "
                "not free: it is {exposed} of a step here, and {exposed_accumulated} of one with four micro-batches."
            ),
            "false": "Through one rank it takes {through_one_ratio} as long, which is no more.",
        },
        seconds=60,
        runs_here=False,
    ),
    Claim(
        name="no_average",
        side="devices",
        title="No average",
        said="After all-reduce no average operation is needed.",
        how="Gradients of 64 digits on two ranks, summed, averaged by DDP, and by the engine, against all at once.",
        measure=devices.no_average,
        numbers={
            "sum_error": Number("relative error of the sum of two ranks' mean losses"),
            "average_error": Number("of DDP's average, 32 + 32 samples", noisy=True),
            "uneven_average_error": Number("of DDP's average, 44 + 20 samples"),
            "uneven_engine_error": Number("of the engine, 44 + 20 samples", noisy=True),
        },
        rule=rules.no_average,
        rule_in_words="True if the error of the sum is below 1e-4; else false.",
        texts={
            "true": "The sum of the ranks is the gradient: the error is {sum_error}.",
            "false": (
                "The sum of mean losses is as many times too large as there are ranks: its error is {sum_error}. DDP "
                "divides by their number itself, which is right for equal shares ({average_error}) and not for others "
                "({uneven_average_error}). Dividing once, by the count of the whole batch, is right for both "
                "({uneven_engine_error})."
            ),
        },
        seconds=10,
        runs_here=False,
    ),
    Claim(
        name="sampler_overlap",
        side="devices",
        title="DistributedSampler",
        said="DistributedSampler gives every rank its own samples, without overlap.",
        how="The indices of one epoch of the digits, from torch's DistributedSampler as it is made by default.",
        measure=devices.sampler_overlap,
        numbers={
            "samples": Number("samples of the data set"),
            "twice_on_2": Number("given twice on 2 ranks"),
            "twice_on_4": Number("given twice on 4 ranks"),
            "twice_on_8": Number("given twice on 8 ranks"),
            "twice_if_divisible": Number("on 8 ranks, of a number that they divide"),
        },
        rule=rules.sampler_overlap,
        rule_in_words=(
            "True if no sample is given twice; true only if that holds where the ranks divide the number of samples; "
            "else false."
        ),
        texts={
            "true": "Of {samples} samples none is given twice.",
            "only_if": (
                "Only if the ranks divide the number of samples ({twice_if_divisible} given twice). Otherwise it fills "
                "up with samples from the beginning: {twice_on_2}, {twice_on_4} and {twice_on_8} of {samples} count "
                "twice, in training and in metrics."
            ),
            "false": "Even where ranks divide the number of samples, {twice_if_divisible} are given twice.",
        },
        seconds=2,
    ),
    Claim(
        name="data_parallel",
        side="devices",
        title="DataParallel",
        said="DataParallel is simple, and good enough.",
        how="Lines of a plain loop that change; steps of 256 digits on two CPU devices, in turns with DDP.",
        measure=devices.data_parallel,
        numbers={
            "lines": Number("lines, DataParallel", "lines"),
            "lines_ddp": Number("lines, DDP", "lines"),
            "time_ratio": Number("time of a step, as a multiple of DDP's", "x", noisy=True),
            "memory_ratio": Number("peak of its process, as a multiple of a DDP rank's", "x"),
        },
        rule=rules.data_parallel,
        rule_in_words=(
            "False if it takes more lines than DDP; true if it takes no more, and less than 1.1 times the time and "
            "memory; else true only if these do not matter."
        ),
        texts={
            "true": "{lines} lines instead of {lines_ddp}, at {time_ratio} the time and {memory_ratio} the memory.",
            "only_if": (
                "It takes {lines} lines, as DDP takes {lines_ddp} besides launching. A step takes {time_ratio} the "
                "time of DDP's here, on CPU threads, and its one process holds {memory_ratio} what a rank of DDP "
                "holds: it copies the model in every step, and outputs and loss meet on one device. It is good enough "
                "only if these do not matter."
            ),
            "false": "It takes {lines} lines, and DDP {lines_ddp}.",
        },
        seconds=40,
        runs_here=False,
    ),
    Claim(
        name="ddp_memory",
        side="devices",
        title="Memory of DDP",
        said="DDP uses the memory of several devices efficiently.",
        how="What the engine keeps between steps on each of four ranks, booked tensor by tensor.",
        measure=devices.ddp_memory,
        numbers={
            "alone_bytes": Number("weights and optimizer states on one device", "bytes"),
            "ddp_bytes": Number("on each of four ranks, DDP", "bytes"),
            "ddp_ratio": Number("as a part of one device's"),
            "fsdp_ratio": Number("the same under FSDP"),
        },
        rule=rules.ddp_memory,
        rule_in_words="True if each of four ranks holds less than half of what one device does; else false.",
        texts={
            "true": "Each of four ranks holds {ddp_ratio} of what one device does.",
            "false": (
                "Activations are shared out, and nothing else is: each of four ranks keeps {ddp_bytes}, which is "
                "{ddp_ratio} of what one device keeps. Shards are what shares the rest out: {fsdp_ratio} of it."
            ),
        },
        seconds=20,
        runs_here=False,
    ),
    Claim(
        name="shards_travel",
        side="devices",
        title="Traffic of shards",
        said="With weights in shards, more micro-batches cost no more traffic.",
        how=(
            "One step in plain PyTorch on two ranks that gather each of four blocks when it is used, with one and "
            "eight micro-batches, in either order of blocks and micro-batches."
        ),
        measure=devices.shards_travel,
        numbers={
            "by_micro_batch": Number("gathered for eight micro-batches, one after the other", "x"),
            "by_layer": Number("gathered where each layer takes all eight", "x"),
            "kept_by_micro_batch": Number("kept between layers, micro-batch by micro-batch", "bytes"),
            "kept_by_layer": Number("kept between layers, layer by layer", "bytes"),
            "waiting_by_micro_batch": Number("whole gradients, micro-batch by micro-batch", "bytes"),
            "waiting_by_layer": Number("whole gradients, layer by layer", "bytes"),
            "gradient_error": Number("largest error of a gradient, float64", noisy=True),
        },
        rule=rules.shards_travel,
        rule_in_words=(
            "True if less than 1.1 times as many bytes are gathered for eight micro-batches as for one; true only if "
            "that holds layer by layer; else false."
        ),
        texts={
            "true": "For eight micro-batches {by_micro_batch} as many bytes are gathered as for one.",
            "only_if": (
                "Only if each layer takes all micro-batches before the next one begins: {by_layer} as many bytes are "
                "gathered for eight as for one, and {by_micro_batch} where they go one after the other. Then "
                "{kept_by_layer} are kept between layers instead of {kept_by_micro_batch}, and {waiting_by_layer} of "
                "whole gradients instead of {waiting_by_micro_batch}."
            ),
            "false": "Not even layer by layer, where {by_layer} as many bytes are gathered.",
        },
        seconds=10,
        runs_here=False,
    ),
    Claim(
        name="linear_to_eight",
        side="devices",
        title="Linear up to eight",
        said="Data parallelism is linear up to eight devices.",
        how=(
            "Forecast, not measured: a residual network of 50 layers, 32 images on each device at a time, one or eight "
            "micro-batches, eight devices in one host or on eight hosts."
        ),
        measure=devices.linear_to_eight,
        numbers={
            "in_one_host": Number("efficiency of eight devices in one host", "%"),
            "in_one_host_accumulated": Number("the same with eight micro-batches", "%"),
            "at_10_gbit": Number("on eight hosts, 10 Gbit/s", "%"),
            "at_10_gbit_accumulated": Number("the same with eight micro-batches", "%"),
            "at_1_gbit": Number("on eight hosts, 1 Gbit/s", "%"),
            "at_1_gbit_accumulated": Number("the same with eight micro-batches", "%"),
        },
        rule=rules.linear_to_eight,
        rule_in_words="True if every efficiency is at least 90%; true only if some are; else false.",
        texts={
            "true": "In one host it is {in_one_host}, and at 1 Gbit/s still {at_1_gbit}.",
            "only_if": (
                "The number is no property of eight, but of the link: {in_one_host} in one host, {at_10_gbit} on hosts "
                "at 10 Gbit/s and {at_1_gbit} at 1 Gbit/s. Eight micro-batches between reductions make that "
                "{at_10_gbit_accumulated} and {at_1_gbit_accumulated}."
            ),
            "false": "Not even in one host, where it is {in_one_host}.",
        },
        seconds=2,
    ),
    Claim(
        name="usual_buckets",
        side="devices",
        title="Buckets",
        said="Gradient buckets of 25 to 50 MB are best.",
        how=(
            "Forecast, not measured: steps on eight hosts with 102 MB and 1 GB of gradients, at 1, 10 and 100 Gbit/s, "
            "with buckets of 1 to 400 MiB."
        ),
        measure=devices.usual_buckets,
        numbers={
            "most_lost_at_25": Number("most that 25 MiB lose to the best size", "%"),
            "most_lost_at_50": Number("most that 50 MiB lose to the best size", "%"),
            "least": Number("smallest of the best sizes, MiB"),
            "most": Number("largest of the best sizes, MiB"),
        },
        rule=rules.usual_buckets,
        rule_in_words=("True if 25 or 50 MiB lose less than 2% everywhere; true only if less than 10%; else false."),
        texts={
            "true": (
                "They lose {most_lost_at_25} and {most_lost_at_50} at most. But the best sizes lie between {least} and "
                "{most} MiB, by link and model, so it is a good default and no law."
            ),
            "only_if": (
                "They lose {most_lost_at_25} and {most_lost_at_50} at most, and the best sizes lie between {least} and "
                "{most} MiB, by link and model: measure it with anybatch scale."
            ),
            "false": (
                "They lose up to {most_lost_at_25} and {most_lost_at_50}: the best sizes lie between {least} and "
                "{most} MiB, by link and model. anybatch scale measures it."
            ),
        },
        seconds=2,
    ),
)
