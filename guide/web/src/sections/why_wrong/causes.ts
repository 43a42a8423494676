/** Causes of a wrong loss, and the questions that lead to them. All numbers are recorded. */

export interface Cause {
  /** What the loop does, as a sentence without a full stop. */
  title: string;
  why: string;
  /** Code with the mistake, and the fix; lines that matter begin with ▸. */
  wrong: string;
  fix: string;
  /** The measured quantity, if it is not the error of the gradient. */
  measure?: "rate" | "samples" | "traffic" | "loss";
  /** The case in the recording of the Trainer, if it is not in `wrong_losses`, and its split. */
  trainer?: string;
  split?: string;
  /** The guide's module with this mistake, for the judge. */
  loop?: string;
  /** Command that checks the reader's own code. */
  check?: string;
}

const LOOP = "anybatch check --loop train.py:train";
const JOB = "anybatch check train.py:job";
const LOSS = "loss = criterion(model(inputs), targets)";
const BY_SAMPLES = `${LOSS}\n# samples_in_window: all samples of this step\n▸(loss * len(inputs) / samples_in_window).backward()`;
const BY_CONSTANT = `${LOSS}\n▸(loss / accumulation_steps).backward()`;
const MEAN_OF_MODEL = '▸def forward(self, input_ids, labels):\n    ...\n    return {"loss": F.cross_entropy(...)}';
const BY_EXACT = "import anybatch as ab\n\n▸trainer = ab.exact(trainer)\ntrainer.train()";
const WINDOW = "for inputs, targets in window:";
const SYNC_LAST = "with nullcontext() if is_last else model.no_sync():";

export const CAUSES = {
  undivided: {
    title: "Nothing divides the sum of the micro-batch losses",
    why: "Means are added, so loss and gradient are too large by the number of micro-batches. SGD then makes longer steps; Adam divides by the usual size of the gradient, so most of the factor cancels.",
    wrong: `${LOSS}\n▸loss.backward()`,
    fix: BY_SAMPLES,
    loop: "mistakes.no_division",
  },
  masked: {
    title: "Micro-batches with few tokens count as much as others",
    why: "Each loss is a mean over the tokens of its own micro-batch, so a token among few has more weight.",
    wrong: BY_CONSTANT,
    fix: `${LOSS}\n▸(loss * num_targets / targets_in_window).backward()`,
    loop: "mistakes.mean_of_means",
  },
  empty: {
    title: "All targets of a micro-batch are masked",
    why: "Its mean is 0/0, so the loss is NaN. If you compute the mean yourself, the gradient is NaN too, and after the update all parameters are. Multiplying the loss by zero does not help, because 0 × NaN = NaN.",
    wrong: "▸loss = (losses * mask).sum() / mask.sum()",
    fix: "▸loss = (losses * mask).sum() / targets_in_window",
    check: `${LOOP} --data tokens`,
  },
  ragged: {
    title: "The last window of an epoch is not full",
    why: "It has fewer samples or micro-batches than the others, but its losses are divided by the same number.",
    wrong: BY_CONSTANT,
    fix: BY_SAMPLES,
    loop: "mistakes.mean_of_means",
  },
  batch_norm: {
    title: "BatchNorm uses the statistics of a micro-batch",
    why: "The network computes another function for each split. No divisor fixes that.",
    wrong: "▸nn.BatchNorm2d(channels)",
    fix: '▸ab.Engine(..., norms="exact")  # much memory; or nn.GroupNorm(groups, channels)',
    check: JOB,
  },
  contrastive: {
    title: "The loss compares samples with each other",
    why: "A sample is compared only with its own micro-batch, so it has fewer negatives. That alone lowers the loss.",
    wrong: "similarity = left @ right.T / temperature\n▸F.cross_entropy(similarity, torch.arange(len(left)))",
    fix: "▸ab.Engine(model, optimizer, ab.joint(encode, loss))",
  },
  trainer_loss: {
    title: "A Trainer adds the means of compute_loss",
    why: "Models of transformers accept num_items_in_batch and divide by it themselves, so the Trainer does not divide. If your own compute_loss returns a mean and ignores that number, nothing divides: the means are summed.",
    wrong: "def compute_loss(self, model, inputs, return_outputs=False, **kwargs):\n    ...\n▸    return F.cross_entropy(logits, labels)",
    fix: BY_EXACT,
    trainer: "compute_loss",
    split: "16 micro-batches in the step",
  },
  trainer_model: {
    title: "A Trainer averages the means of a model",
    why: "If the model does not accept num_items_in_batch, the Trainer gives all micro-batches the same weight.",
    wrong: MEAN_OF_MODEL,
    fix: BY_EXACT,
    trainer: "module",
    split: "16 micro-batches in the step",
  },
  trainer_tail: {
    title: "A Trainer’s last micro-batch is not full",
    why: "If the model does not accept num_items_in_batch, the Trainer divides by the number of micro-batches, so the few last samples count too much.",
    wrong: MEAN_OF_MODEL,
    fix: BY_EXACT,
    trainer: "module_ragged",
    split: "micro-batches of 16 and 5 in the last step",
  },
  shares: {
    title: "Ranks with different numbers of samples count equally",
    why: "DistributedDataParallel averages over ranks, regardless of their samples.",
    wrong: "▸loss.backward()  # the mean of this rank’s samples",
    fix: "▸(loss_sum * world_size / samples_on_all_ranks).backward()",
  },
  sampler: {
    title: "DistributedSampler repeats samples",
    why: "It fills the shares of the ranks with samples from the start of the epoch, which count a second time in the last step.",
    wrong: "▸sampler = DistributedSampler(dataset)",
    fix: "▸for batch in ab.batches(dataset, effective_batch_size=64):\n# or drop_last=True, which skips samples",
  },
  no_sync_backward: {
    title: "The forward runs outside no_sync()",
    why: "DistributedDataParallel decides in the forward whether to reduce, so this no_sync() has no effect: the gradient is correct, but it is sent once per micro-batch instead of once per step.",
    wrong: `▸${LOSS}\n${SYNC_LAST}\n    loss.backward()`,
    fix: `${SYNC_LAST}\n▸    ${LOSS}\n    loss.backward()`,
    measure: "traffic",
    loop: "exercises.no_sync_backward",
  },
  no_sync_always: {
    title: "Every micro-batch runs inside no_sync()",
    why: "Nothing is ever reduced: each rank steps with its own gradient, and the replicas drift apart.",
    wrong: `▸with model.no_sync():\n    ${LOSS}\n    loss.backward()`,
    fix: `▸${SYNC_LAST}\n    ${LOSS}\n    loss.backward()`,
    loop: "exercises.no_sync_always",
  },
  zero_each: {
    title: "zero_grad() runs in every micro-batch",
    why: "Only the gradient of the last micro-batch is left when the optimizer steps.",
    wrong: `${WINDOW}\n▸    optimizer.zero_grad()\n    ...`,
    fix: `▸optimizer.zero_grad()\n${WINDOW}\n    ...`,
    loop: "mistakes.zero_each",
  },
  zero_missing: {
    title: "zero_grad() never runs",
    why: "Each step uses its own gradient plus those of all earlier steps.",
    wrong: "▸optimizer.step()",
    fix: "optimizer.step()\n▸optimizer.zero_grad()",
    loop: "exercises.with_ranks",
  },
  clip_each: {
    title: "Every micro-batch is clipped",
    why: "Each clipping shortens the sum so far, so early micro-batches count less.",
    wrong: `${WINDOW}\n    ...\n▸    clip_grad_norm_(model.parameters(), max_norm)\noptimizer.step()`,
    fix: `${WINDOW}\n    ...\n▸clip_grad_norm_(model.parameters(), max_norm)\noptimizer.step()`,
    loop: "mistakes.clip_each",
  },
  schedule_each: {
    title: "The scheduler steps in every micro-batch",
    why: "The learning rate falls too fast, by a factor of the number of micro-batches.",
    wrong: `${WINDOW}\n    ...\n▸    scheduler.step()\noptimizer.step()`,
    fix: `${WINDOW}\n    ...\noptimizer.step()\n▸scheduler.step()`,
    measure: "rate",
    loop: "mistakes.schedule_each",
  },
  drop_tail: {
    title: "The loop steps on full windows only",
    why: "Samples at the end of an epoch that do not fill a window are never used if zero_grad() runs before each window, as here. If it runs after the step, they are added to the next epoch instead.",
    wrong: "▸if number % accumulation_steps == 0:\n    optimizer.step()",
    fix: "▸if number % accumulation_steps == 0 or number == len(loader):\n    optimizer.step()",
    measure: "samples",
    loop: "mistakes.drop_tail",
  },
  rate: {
    title: "A larger batch has the learning rate of the small one",
    why: "The gradient is correct, but an epoch has fewer steps, and each is as long as before. Tune the rate for the new batch.",
    wrong: "▸torch.optim.SGD(model.parameters(), lr=rate_of_the_small_batch)",
    fix: "▸torch.optim.SGD(model.parameters(), lr=rate_tuned_for_this_batch)",
    measure: "loss",
    check: "anybatch advise digits",
  },
} satisfies Record<string, Cause>;

export type CauseId = keyof typeof CAUSES;

/** A question, and for each answer another question or the cause. */
export interface Question {
  ask: string;
  answers: readonly (readonly [label: string, next: Question | CauseId])[];
}

const ask = (question: string, ...answers: Question["answers"]): Question => ({ ask: question, answers });
const byRunner = (own: Question | CauseId, trainer: CauseId) => ask("What runs the steps?", ["My own loop", own], ["A transformers Trainer", trainer]);

export const SYMPTOMS = ask(
  "What is wrong with the loss?",
  ["Wrong by a factor", byRunner(ask("Is the loss of a micro-batch divided before backward()?", ["No", "undivided"], ["Yes, by the same number in every step", "ragged"]), "trainer_loss")],
  [
    "Jumps at epoch ends",
    ask(
      "Is the number of steps per epoch equal to ceil(samples / effective batch)?",
      ["No, one fewer", "drop_tail"],
      ["Yes", byRunner(ask("Does a DistributedSampler share out the samples?", ["Yes", "sampler"], ["No", "ragged"]), "trainer_tail")],
    ),
  ],
  [
    "Differs from one unsplit batch",
    ask(
      "When do the two losses first differ?",
      [
        "In the first step, before any update",
        ask("What does the loss depend on?", ["Tokens, some of them masked", byRunner("masked", "trainer_model")], ["BatchNorm", "batch_norm"], ["Comparisons of samples", "contrastive"]),
      ],
      [
        "After one or two updates",
        ask("What else runs in every micro-batch?", ["zero_grad()", "zero_each"], ["clip_grad_norm_()", "clip_each"], ["scheduler.step()", "schedule_each"], ["Nothing; zero_grad() runs nowhere", "zero_missing"]),
      ],
      ["In the second epoch", "drop_tail"],
      ["Never, but both fall too slowly", "rate"],
    ),
  ],
  [
    "Only on several ranks",
    ask(
      "Are the parameters equal on all ranks after a step?",
      ["No", "no_sync_always"],
      ["Yes", ask("Which steps are wrong?", ["All of them", "shares"], ["The last one of an epoch", "sampler"], ["None, but the run is slow", "no_sync_backward"])],
    ),
  ],
  [
    "NaN or diverging",
    ask("How does it begin?", ["NaN from one step to the next", "empty"], ["It grows from the first updates on", byRunner("undivided", "trainer_loss")], ["It falls, then rises again and again", "zero_missing"]),
  ],
);

/** The questions so far, and the cause if the chosen answers lead to one. */
export function follow(chosen: readonly number[]): { questions: Question[]; cause: CauseId | undefined } {
  const questions = [SYMPTOMS];
  for (const answer of chosen) {
    const next = questions.at(-1)?.answers[answer]?.[1];
    if (typeof next === "string") return { questions, cause: next };
    if (next) questions.push(next);
  }
  return { questions, cause: undefined };
}

/** All ways through a question: the answers, and the cause that they lead to. */
export function ways(question: Question = SYMPTOMS, chosen: number[] = []): { chosen: number[]; cause: CauseId }[] {
  return question.answers.flatMap(([, next], at) => (typeof next === "string" ? [{ chosen: [...chosen, at], cause: next }] : ways(next, [...chosen, at])));
}

interface Losses {
  with: (number | string)[]; // "NaN" is a string in a recording
  without: number[];
}
export interface WrongLosses {
  mistakes: Record<string, { amounts: { at: string; amount: number | string }[]; losses: Losses }>;
  example: { source: string; output: string };
  roles: Record<string, string>;
}
export interface TrainerLosses {
  errors: Record<string, number[]>;
  losses: Record<string, Losses>;
}

/** A cause with its recorded numbers. */
export interface Measured extends Cause {
  amounts: { at: string; amount: number }[];
  losses: { with: number[]; without: number[] };
  /** The first step, from 1, whose loss is NaN, or else differs by more than rounding. */
  differs: number | undefined;
}

/** Join a cause and the recordings. */
export function measured(id: CauseId, data: WrongLosses, trainer: TrainerLosses): Measured {
  const cause: Cause = CAUSES[id];
  const errors = trainer.errors[cause.trainer ?? ""] ?? [];
  const own = cause.trainer === undefined ? data.mistakes[id] : { amounts: [{ at: cause.split ?? "", amount: errors.at(-1) ?? NaN }], losses: trainer.losses[cause.trainer] };
  if (!own?.losses) throw new Error(`nothing was recorded of ${id}`);
  const losses = { with: own.losses.with.map(Number), without: own.losses.without };
  const nan = losses.with.findIndex(Number.isNaN);
  const at = nan >= 0 ? nan : losses.with.findIndex((loss, step) => Math.abs(loss - (losses.without[step] ?? loss)) > 1e-5 * Math.abs(loss));
  return {
    ...cause,
    amounts: own.amounts.map((each) => ({ at: each.at, amount: Number(each.amount) })),
    losses,
    differs: at < 0 ? undefined : at + 1,
  };
}
