/** Possible mistakes in a loss: the option, the wrong line, the fix. Numbers and findings are recorded. */

/** The measured quantity: the gradient, relative to the full batch, or something else. */
export type Measure = "gradient" | "rate" | "samples" | "traffic" | "loss";

export interface Cause {
  id: string;
  /** Label of the option: something the loop has. */
  has: string;
  measure: Measure;
  /** The recording, if not `wrong_losses`. */
  recorded?: "trainer_losses";
  /** Its name in the errors of the recording; `amount` reads the other measures. */
  error: string;
  why: string;
  /** The wrong line, if no recorded loop has it. */
  line?: string;
  /** The loop in the recording whose lines, findings and command are shown. */
  loop?: string;
  /** Code of the checker's finding, if no recorded loop has it. */
  finding?: string;
  cure: string;
  /** Command that checks the user's own code, if no loop is recorded. */
  command?: string;
}

export interface WrongLosses {
  errors: Record<string, number>;
  sent_bytes: Record<string, number>;
  loops: { name: string; lines: string[]; findings: { code: string; found: string; expected: string }[]; command: string }[];
}

const SHARE = "(loss * share(targets, window)).backward()  # its items / items of the window";
const ITEMS = 'def forward(self, input_ids, labels, **kwargs): ...  # sum / kwargs["num_items_in_batch"]';
const LOOP = "anybatch check --loop train.py:train";
const JOB = "anybatch check train.py:job";

export const CAUSES: readonly Cause[] = [
  {
    id: "masked",
    has: "masked tokens, or sentences of different lengths",
    measure: "gradient",
    error: "masked_tokens",
    why: "Each micro-batch’s loss is a mean over its own tokens, so tokens of a short micro-batch have more weight.",
    loop: "mean_of_means",
    cure: SHARE,
  },
  {
    id: "ragged",
    has: "a last micro-batch or window that is not full",
    measure: "gradient",
    error: "ragged_tail",
    why: "The few samples of the last micro-batch have the same total weight as a full one.",
    loop: "mean_of_means",
    cure: SHARE,
  },
  {
    id: "undivided",
    has: "no division at all",
    measure: "gradient",
    error: "no_division",
    why: "Means of micro-batches are added up, so the gradient is too long by the number of micro-batches. Adam hides this, SGD does not.",
    loop: "no_division",
    cure: SHARE,
  },
  {
    id: "batch_norm",
    has: "BatchNorm",
    measure: "gradient",
    error: "batch_norm",
    why: "It normalises with the statistics of a micro-batch, so the network computes a different function; no divisor fixes that.",
    line: "nn.BatchNorm2d(channels)",
    cure: 'ab.Engine(..., norms="exact")  # or nn.GroupNorm(groups, channels)',
    command: JOB,
  },
  {
    id: "contrastive",
    has: "a contrastive loss, or another loss across samples",
    measure: "gradient",
    error: "contrastive",
    why: "A sample is compared only with samples of the same micro-batch, so it has fewer negatives.",
    line: "F.cross_entropy(left @ right.T / temperature, torch.arange(len(left)))",
    finding: "not_a_weighted_sum",
    cure: "ab.Engine(model, optimizer, ab.joint(encode, loss))",
    command: LOOP,
  },
  {
    id: "trainer_loss",
    has: "a Trainer, with a custom compute_loss",
    measure: "gradient",
    recorded: "trainer_losses",
    error: "compute_loss",
    why: "The Trainer does not divide if a model takes num_items_in_batch, as the models of transformers do. Their built-in loss is correct; with a mean instead, the gradient is too long by the number of micro-batches.",
    line: "def compute_loss(self, model, inputs, return_outputs=False, **kwargs): ...  # the mean of this micro-batch",
    finding: "loss_declaration",
    cure: "Trainer(..., compute_loss_func=loss)  # loss(outputs, labels, num_items_in_batch): sum / num_items_in_batch",
    command: JOB,
  },
  {
    id: "trainer_model",
    has: "a Trainer, with a model that returns the mean over its tokens",
    measure: "gradient",
    recorded: "trainer_losses",
    error: "module",
    why: "For a model without num_items_in_batch, the Trainer gives every micro-batch the same weight.",
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
    why: "The Trainer divides by the number of micro-batches of the last step, not by their samples: the few samples of the last one have too much weight.",
    line: "Trainer(..., train_dataset=dataset)",
    cure: ITEMS,
    command: JOB,
  },
  {
    id: "shares",
    has: "several ranks whose shares differ",
    measure: "gradient",
    error: "unequal_shares",
    why: "DistributedDataParallel averages over ranks, regardless of their sample counts.",
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
    why: "It pads the shares of the ranks with samples from the start: in the last step of this epoch, one sample counts twice.",
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
    why: "DistributedDataParallel decides in the forward whether the backward will reduce. The gradient is correct, but is sent too often.",
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
    why: "Only the gradient of the last micro-batch is left when the optimizer steps.",
    loop: "zero_each",
    cure: "optimizer.zero_grad()  # once, before the window’s first micro-batch",
  },
  {
    id: "zero_missing",
    has: "no zero_grad",
    measure: "gradient",
    error: "zero_missing",
    why: "Each step adds its gradient to the gradients of all earlier steps; measured in the second step.",
    loop: "with_ranks",
    cure: "optimizer.zero_grad()  # after optimizer.step()",
  },
  {
    id: "clip_each",
    has: "clipping in every micro-batch",
    measure: "gradient",
    error: "clip_each",
    why: "Each clipping shortens the sum so far, so early micro-batches have less weight.",
    loop: "clip_each",
    cure: "clip_grad_norm_(model.parameters(), max_norm)  # once, when the sum is complete",
  },
  {
    id: "schedule_each",
    has: "a schedule that steps in every micro-batch",
    measure: "rate",
    error: "schedule_each",
    why: "The learning rate falls too fast, by a factor of the number of micro-batches.",
    loop: "schedule_each",
    cure: "scheduler.step()  # after optimizer.step()",
  },
  {
    id: "drop_tail",
    has: "a loop that steps on full windows only",
    measure: "samples",
    error: "drop_tail",
    why: "Samples that do not fill a window at the end of an epoch are never used.",
    loop: "drop_tail",
    cure: "if number % accumulation_steps == 0 or number == len(loader): ...  # and divide by the count of the window",
  },
  {
    id: "rate",
    has: "a larger batch at the old learning rate",
    measure: "loss",
    error: "rate",
    why: "The gradient is correct and less noisy, but there are fewer steps of the same length.",
    line: "torch.optim.SGD(model.parameters(), lr=rate_of_the_small_batch)",
    cure: "tune the rate again for the larger batch, see “How large should the batch be?”",
    command: "anybatch advise RECIPE",
  },
];

/** Steps of a Trainer: relative errors by case. */
export interface TrainerLosses {
  errors: Record<string, number[]>;
}

/** A cause with its recorded data. */
export interface Found extends Cause {
  amount: number;
  lines: string[];
  findings: { code: string; found?: string; expected?: string }[];
  ask: string;
}

/** Join causes and recordings; `rate` is the worst loss of an unscaled rate, as a multiple of the best loss. */
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
