/** What may be wrong with a loss: what is ticked, the line that does it, its cure. Numbers and findings are recorded. */

/** What is measured: of the gradient, relative to that of the whole batch, or of something else. */
export type Measure = "gradient" | "rate" | "samples" | "traffic" | "loss";

export interface Cause {
  id: string;
  /** What a loop has, as one ticks it. */
  has: string;
  measure: Measure;
  /** The recording it is in, if not `wrong_losses`. */
  recorded?: "trainer_losses";
  /** Its name in the recording's errors; other measures are read by `amount`. */
  error: string;
  why: string;
  /** Lines that do it; of loops that were recorded with it, these are the recording's. */
  line?: string;
  /** The loop in the recording whose lines, findings and command are shown. */
  loop?: string;
  /** What the checker calls it, where no recorded loop has found it. */
  finding?: string;
  cure: string;
  /** What asks about one's own code, where no loop is recorded. */
  command?: string;
}

export interface WrongLosses {
  errors: Record<string, number>;
  sent_bytes: Record<string, number>;
  loops: { name: string; lines: string[]; findings: { code: string; found: string; expected: string }[]; command: string }[];
}

const SHARE = "(loss * share(targets, window)).backward()  # its items / those of the window";
const ITEMS = 'def forward(self, input_ids, labels, **kwargs): ...  # sum / kwargs["num_items_in_batch"]';
const LOOP = "anybatch check --loop train.py:train";
const JOB = "anybatch check train.py:job";

export const CAUSES: readonly Cause[] = [
  {
    id: "masked",
    has: "masked tokens, or sentences of different lengths",
    measure: "gradient",
    error: "masked_tokens",
    why: "Each micro-batch’s loss is a mean over its own tokens, so tokens of a short one count more.",
    loop: "mean_of_means",
    cure: SHARE,
  },
  {
    id: "ragged",
    has: "a last micro-batch or window that is not full",
    measure: "gradient",
    error: "ragged_tail",
    why: "The few samples of the last micro-batch count as much as those of a full one.",
    loop: "mean_of_means",
    cure: SHARE,
  },
  {
    id: "undivided",
    has: "no division at all",
    measure: "gradient",
    error: "no_division",
    why: "Means of micro-batches are added up: the gradient is as many times too long as there are micro-batches. Adam hides it, SGD does not.",
    loop: "no_division",
    cure: SHARE,
  },
  {
    id: "batch_norm",
    has: "BatchNorm",
    measure: "gradient",
    error: "batch_norm",
    why: "It normalises with the statistics of a micro-batch, so the network computes another function; no divisor mends that.",
    line: "nn.BatchNorm2d(channels)",
    cure: 'ab.Engine(..., norms="exact")  # or nn.GroupNorm(groups, channels)',
    command: JOB,
  },
  {
    id: "contrastive",
    has: "a contrastive loss, or another across samples",
    measure: "gradient",
    error: "contrastive",
    why: "A sample is told apart from those of its own micro-batch only, so it has fewer others to be told apart from.",
    line: "F.cross_entropy(left @ right.T / temperature, torch.arange(len(left)))",
    finding: "not_a_weighted_sum",
    cure: "ab.Engine(model, optimizer, ab.joint(encode, loss))",
    command: LOOP,
  },
  {
    id: "trainer_loss",
    has: "a Trainer, with a compute_loss of one’s own",
    measure: "gradient",
    recorded: "trainer_losses",
    error: "compute_loss",
    why: "The Trainer does not divide where a model takes num_items_in_batch, as those of transformers do: their own loss is right up to rounding, a mean in its place is as many times too long as there are micro-batches.",
    line: "def compute_loss(self, model, inputs, return_outputs=False, **kwargs): ...  # the mean of this micro-batch",
    finding: "loss_declaration",
    cure: "Trainer(..., compute_loss_func=loss)  # loss(outputs, labels, num_items_in_batch): sum / num_items_in_batch",
    command: JOB,
  },
  {
    id: "trainer_model",
    has: "a Trainer, with a model that returns the mean of its tokens",
    measure: "gradient",
    recorded: "trainer_losses",
    error: "module",
    why: "A model that takes no num_items_in_batch is averaged by micro-batch, whatever is in it.",
    line: "def forward(self, input_ids, labels): ...",
    finding: "loss_declaration",
    cure: ITEMS,
    command: JOB,
  },
  {
    id: "trainer_tail",
    has: "a Trainer, and a last micro-batch that is not full",
    measure: "gradient",
    recorded: "trainer_losses",
    error: "module_ragged",
    why: "The Trainer divides by the micro-batches of the last step, and not by their samples: the few of its last one count too much.",
    line: "Trainer(..., train_dataset=dataset)",
    cure: ITEMS,
    command: JOB,
  },
  {
    id: "shares",
    has: "several ranks whose shares differ",
    measure: "gradient",
    error: "unequal_shares",
    why: "DistributedDataParallel averages over ranks, whatever each of them had.",
    line: "loss.backward()  # under DistributedDataParallel",
    finding: "uneven_ranks",
    cure: "(loss_sum * world_size / count_of_all_ranks).backward()",
    command: LOOP,
  },
  {
    id: "sampler",
    has: "a DistributedSampler",
    measure: "gradient",
    error: "sampler",
    why: "It fills the ranks’ shares up with samples from the beginning: in the last step of this epoch one counts twice.",
    line: "sampler = DistributedSampler(dataset)",
    finding: "samples_duplicated",
    cure: "for batch in ab.batches(dataset, effective_batch_size=64): ...",
    command: LOOP,
  },
  {
    id: "no_sync_backward",
    has: "no_sync around the backward only",
    measure: "traffic",
    error: "no_sync_backward",
    why: "DistributedDataParallel decides in the forward whether the backward will reduce. The gradient is right, and travels too often.",
    loop: "no_sync_backward",
    cure: "with model.no_sync():  # around the forward too",
  },
  {
    id: "no_sync_always",
    has: "no_sync around every micro-batch",
    measure: "gradient",
    error: "no_sync_always",
    why: "Nothing is ever reduced: each rank steps with its own gradient, and the replicas drift apart.",
    loop: "no_sync_always",
    cure: "with nullcontext() if is_last else model.no_sync():",
  },
  {
    id: "zero_each",
    has: "zero_grad in every micro-batch",
    measure: "gradient",
    error: "zero_each",
    why: "Only the last micro-batch is left when the optimizer steps.",
    loop: "zero_each",
    cure: "optimizer.zero_grad()  # once, before the window’s first micro-batch",
  },
  {
    id: "zero_missing",
    has: "no zero_grad",
    measure: "gradient",
    error: "zero_missing",
    why: "Each step adds its gradient to those of all steps before it; measured in the second one.",
    loop: "with_ranks",
    cure: "optimizer.zero_grad()  # after optimizer.step()",
  },
  {
    id: "clip_each",
    has: "clipping in every micro-batch",
    measure: "gradient",
    error: "clip_each",
    why: "What has been added up so far is shortened each time, so early micro-batches count less.",
    loop: "clip_each",
    cure: "clip_grad_norm_(model.parameters(), max_norm)  # once, when the sum is complete",
  },
  {
    id: "schedule_each",
    has: "a schedule that steps in every micro-batch",
    measure: "rate",
    error: "schedule_each",
    why: "The learning rate falls as many times too fast as there are micro-batches.",
    loop: "schedule_each",
    cure: "scheduler.step()  # after optimizer.step()",
  },
  {
    id: "drop_tail",
    has: "a loop that steps on full windows only",
    measure: "samples",
    error: "drop_tail",
    why: "What does not fill a window at an epoch’s end is never learned from.",
    loop: "drop_tail",
    cure: "if number % accumulation_steps == 0 or number == len(loader): ...  # and divide by what the window counts",
  },
  {
    id: "rate",
    has: "a larger batch at the old learning rate",
    measure: "loss",
    error: "rate",
    why: "The gradient is right and less noisy; the steps are fewer, and as short as before.",
    line: "torch.optim.SGD(model.parameters(), lr=rate_of_the_small_batch)",
    cure: "find the rate anew for the larger batch, see “How large a batch”",
    command: "anybatch advise RECIPE",
  },
];

/** Steps of a Trainer, by case: how far off each is. */
export interface TrainerLosses {
  errors: Record<string, number[]>;
}

/** A cause with what was recorded of it. */
export interface Found extends Cause {
  amount: number;
  lines: string[];
  findings: { code: string; found?: string; expected?: string }[];
  ask: string;
}

/** Join causes and recordings; `rate` is how many times the best loss a rate that was kept gives, at worst. */
export function found(causes: readonly Cause[], data: WrongLosses, trainer: TrainerLosses, rate: number): Found[] {
  return causes.map((cause) => {
    const loop = data.loops.find((one) => one.name === cause.loop);
    if (cause.loop !== undefined && !loop) throw new Error(`no loop ${cause.loop} was recorded`);
    return {
      ...cause,
      amount: amount(cause, data, trainer, rate),
      lines: cause.line !== undefined ? [cause.line] : (loop?.lines ?? []),
      findings: loop?.findings ?? (cause.finding === undefined ? [] : [{ code: cause.finding }]),
      ask: loop?.command ?? cause.command ?? LOOP,
    };
  });
}

function amount(cause: Cause, data: WrongLosses, trainer: TrainerLosses, rate: number): number {
  if (cause.measure === "loss") return rate;
  const gradient = cause.recorded ? trainer.errors[cause.error]?.at(-1) : data.errors[cause.error];
  const own = cause.measure === "traffic" ? (data.sent_bytes[cause.error] ?? Number.NaN) / (data.sent_bytes["right"] ?? Number.NaN) : gradient;
  if (own === undefined || Number.isNaN(own)) throw new Error(`nothing was recorded of ${cause.error}`);
  return own;
}
