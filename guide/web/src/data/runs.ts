/** The playground's logic without the DOM: runs, building a run from lines, and the nearest recorded run. */
import { formatBytes } from "../math/format";
import { oneOf, real, whole, type ValueOf } from "./address";
import type { Category, Line, Made, Setting } from "./types";

/** A run, recorded or live: columns by step. */
export interface Run {
  setting: Setting;
  status: "running" | "completed" | "stopped" | "failed";
  message?: string;
  losses: (number | null)[];
  gradient_norms: (number | null)[];
  learning_rates: (number | null)[];
  relative_differences: (number | null)[];
  native_losses: (number | null)[];
  /** Numbers of updates after which both networks were evaluated on held-out samples. */
  evaluated: number[];
  accuracies: number[];
  native_accuracies: (number | null)[];
  /** Answers for the shown held-out samples: a character for each image, or a line for each sentence. */
  answers: string[];
  /** Relative error of its first update, compared with the native batch (both with SGD at a rate of 1); null until it is reported. */
  first_update_difference: number | null;
  /** Peak bytes of the inspected step, by category. */
  peak: Record<string, number>;
  /** Micro-batch sizes after each out-of-memory retry. */
  smaller_sizes: number[];
  /** Bytes of gradients that a rank sends per step. */
  reduced_bytes: number;
  digest: string | null;
  surfaces: { updates: number; values: string }[];
  /** Recorded presets only: step, sum over ranks after each micro-batch (later steps: after the last one), and native gradient, as signed bytes in base64. */
  gradients?: [step: number, sums: string[], native: string][];
}

export type Samples = { kind: "images"; side: number; values: string } | { kind: "points"; values: [number, number][] } | { kind: "texts"; values: string[] };

/** One micro-batch in detail: some components of the gradient, and in a single-step run some of its samples. */
export interface MicroBatchDetails {
  rank: number;
  step: number;
  position: number;
  /** Number of micro-batches in its step, on its rank; a run's last step may have fewer than the others. */
  of?: number;
  num_samples: number;
  samples?: Samples;
  gradient: number[];
  sum: number[];
}

/** Held-out samples whose answers are shown, and the right answers. */
export interface ShownSamples {
  samples: Samples;
  answers: string;
}

export interface Beginning {
  steps: number;
  optimizer: Setting["optimizer"];
  adamw: number;
  sgd: number;
  norm: Setting["norm"];
  classes: number;
}

/** Data embedded in the page. */
export interface Opening {
  runs: Run[];
  beginnings: Record<Setting["task"], Beginning>;
  limits: Record<string, [number, number]>;
  together: { effective: number; samples: number; bytes: number };
  sample_bytes: Record<Setting["task"], number>;
  ghost_samples: number;
  first_micro_batches: MicroBatchDetails[];
  first_native_gradient: number[];
  shown: ShownSamples;
  programs: Record<string, string>;
  examples: { setting: Setting; python: string; command: string }[];
}

export interface Grid {
  runs: Run[];
  shown?: ShownSamples;
  /** The plane of spirals before the first update. */
  untrained?: string;
  points?: [number, number, number][];
  extent?: number;
}

export const TASKS = ["digits", "spirals", "shapes", "text"] as const;
export const MISTAKES = ["", "no_division", "zero_each", "clip_each", "schedule_each", "drop_tail", "mean_of_means"] as const;
export const TASK_NAMES: Record<Setting["task"], string> = { digits: "digits", spirals: "spirals", shapes: "shapes", text: "text" };
export const MISTAKE_NAMES: Record<Setting["mistake"], string> = {
  "": "none (correct)",
  no_division: "forget to divide",
  zero_each: "zero_grad() in every micro-batch",
  clip_each: "clip in every micro-batch",
  schedule_each: "scheduler.step() in every micro-batch",
  drop_tail: "skip the last samples",
  mean_of_means: "equal weight for unequal parts",
};

export const POLICIES = ["keep", "exact", "ghost", "freeze", "sync"] as const;
export const POLICY_NAMES: Record<Setting["norm_policy"], string> = { keep: "keep", exact: "exact", ghost: "ghost groups", freeze: "freeze", sync: "sync" };

/** A run that starts with one click. */
export interface Preset {
  name: string;
  /** What to look at. */
  look: string;
  change: Partial<Setting>;
}

export const PRESETS: readonly Preset[] = [
  { name: "Forgot to divide", change: { mistake: "no_division" }, look: "Four undivided micro-batches make each update four times as large: the bars pass their outline, and the loss leaves the chart." },
  { name: "BatchNorm 4 × 16", change: { task: "shapes", micro_batch_size: 4, accumulation_steps: 16 }, look: "BatchNorm normalizes each micro-batch of four on its own, so the curves separate." },
  { name: "Exact BatchNorm", change: { task: "shapes", micro_batch_size: 4, accumulation_steps: 16, norm_policy: "exact" }, look: "With the statistics of the whole batch, the curves coincide again. But this needs almost as much memory as one pass." },
  { name: "Out of memory, repeated", change: { micro_batch_size: 64, memory_limit_kib: 2048 }, look: "64 samples exceed the limit. The engine halves the micro-batch until the step fits, and repeats the step." },
  { name: "Two ranks, unequal", change: { ranks: 2 }, look: "The last batch of an epoch has 29 samples: 15 for one rank, 14 for the other. The update stays exact." },
  { name: "Two spirals", change: { task: "spirals" }, look: "The colour of a point is the network's answer there. Watch the boundary follow the arms." },
];

/** The setting of a preset: what it changes in the initial one, with the defaults of its task. */
export function presetSetting(preset: Preset, opening: Opening): Setting {
  const first = (opening.runs[0] as Run).setting;
  return { ...withTask(first, preset.change.task ?? first.task, opening), ...preset.change };
}

const SHAPE = {
  task: oneOf(...TASKS),
  norm: oneOf("batch", "group", "none"),
  micro: whole(1, 256),
  accumulation: whole(1, 64),
  optimizer: oneOf("sgd", "adamw"),
  rate: real(1e-6, 10),
  steps: whole(1, 2000),
  seed: whole(0, 2 ** 32 - 1),
  precision: oneOf("fp32", "bf16"),
  mistake: oneOf(...MISTAKES),
  ranks: whole(1, 2),
  policy: oneOf(...POLICIES),
  limit: whole(0, 2 ** 20),
};
type Address = ValueOf<typeof SHAPE>;

/** Format of a setting in an address. */
export const addressShape = SHAPE;

export function toAddress(setting: Setting): Address {
  const { micro_batch_size: micro, accumulation_steps: accumulation, learning_rate: rate, norm_policy: policy, memory_limit_kib: limit, ...same } = setting;
  return { ...same, micro, accumulation, rate, policy, limit };
}

export function fromAddress(address: Address): Setting {
  const { micro, accumulation, rate, policy, limit, ...same } = address;
  return { ...same, micro_batch_size: micro, accumulation_steps: accumulation, learning_rate: rate, norm_policy: policy, memory_limit_kib: limit };
}

/** Samples of one step, over all ranks. */
export function effective(of: Setting): number {
  return of.micro_batch_size * of.accumulation_steps * of.ranks;
}

/** The split: 16 × 4, or 16 × 4 × 2 on two ranks. */
export function cut(of: Setting): string {
  return [of.micro_batch_size, of.accumulation_steps, ...(of.ranks > 1 ? [of.ranks] : [])].join(" × ");
}

/** Name of a run: its task, split and what is special about it. */
export function nameOf({ setting: of }: Run): string {
  const mistake = of.mistake ? `, ${MISTAKE_NAMES[of.mistake]}` : "";
  const norm = of.task === "shapes" ? `, ${of.norm} norm` : "";
  const policy = of.norm_policy === "keep" ? "" : ` (${POLICY_NAMES[of.norm_policy]})`;
  const limit = of.memory_limit_kib ? `, at most ${formatBytes(of.memory_limit_kib * 1024)}` : "";
  return `${TASK_NAMES[of.task]} ${cut(of)}${of.ranks > 1 ? " ranks" : ""}, ${of.optimizer === "sgd" ? "SGD" : "AdamW"}${norm}${policy}${limit}${mistake}`;
}

/** Reason for refusing a setting, or null: the same rules as in guide/src/anybatch_guide/setting.py. */
export function refusal(setting: Setting, opening: Opening): string | null {
  const { effective: maxEffective, samples, bytes } = opening.together;
  const size = effective(setting);
  if (setting.norm !== "none" && setting.task !== "shapes") return "Only shapes have a norm to choose.";
  if (setting.mistake !== "" && setting.precision !== "fp32") return "Loops with a mistake run in float32 only.";
  if (setting.mistake !== "" && (setting.ranks > 1 || setting.memory_limit_kib > 0)) return "Loops with a mistake run on one rank, without a limit.";
  if (setting.norm_policy !== "keep" && (setting.norm !== "batch" || setting.mistake !== "")) return "A policy about BatchNorm needs the engine, and BatchNorm.";
  if (setting.norm_policy === "ghost" && setting.micro_batch_size < opening.ghost_samples) return `Groups of ${opening.ghost_samples} need micro-batches of ${opening.ghost_samples} samples at least.`;
  if (size > maxEffective) return `A step may have ${maxEffective} samples at most.`;
  if (size * setting.steps > samples) return "That is too much work: take fewer steps, or smaller batches.";
  if (size * opening.sample_bytes[setting.task] > bytes) return "The batch at once, which runs beside it, would take too much memory.";
  return null;
}

/** Switch to another task, with its default values. */
export function withTask(setting: Setting, task: Setting["task"], opening: Opening): Setting {
  const own = opening.beginnings[task];
  return { ...setting, task, norm: own.norm, norm_policy: "keep", memory_limit_kib: 0, steps: own.steps, optimizer: own.optimizer, learning_rate: own[own.optimizer] };
}

export function sameSetting(one: Setting, other: Setting): boolean {
  return (Object.keys(one) as (keyof Setting)[]).every((key) => one[key] === other[key]);
}

/** The recorded run nearest to a setting. The last change counts most, then mistake, optimizer, norm and split. */
export function nearest(wanted: Setting, runs: readonly Run[], changed?: keyof Setting): Run | undefined {
  const distance = (run: Run): number => {
    const { setting } = run;
    const doublings = (key: "micro_batch_size" | "accumulation_steps") => Math.abs(Math.log2(setting[key] / wanted[key]));
    let sum = doublings("micro_batch_size") + doublings("accumulation_steps");
    if (setting.mistake !== wanted.mistake) sum += 100;
    if (setting.norm !== wanted.norm) sum += 50;
    if (setting.ranks !== wanted.ranks) sum += 60;
    if (setting.norm_policy !== wanted.norm_policy) sum += 45;
    if (setting.optimizer !== wanted.optimizer) sum += 25;
    if (setting.memory_limit_kib !== wanted.memory_limit_kib) sum += 15 + Math.abs(Math.log2((setting.memory_limit_kib || 2 ** 20) / (wanted.memory_limit_kib || 2 ** 20)));
    if (changed && setting[changed] !== wanted[changed]) sum += 1000;
    return sum;
  };
  return runs.filter((run) => run.setting.task === wanted.task).reduce<Run | undefined>((best, run) => (best === undefined || distance(run) < distance(best) ? run : best), undefined);
}

/** Predicted peak memory without a limit: recorded, or interpolated between recorded runs that differ only in their split; null with fewer than two. */
export function predictedPeak(setting: Setting, runs: readonly Run[]): number | null {
  const isComparable = ({ setting: of, peak }: Run) =>
    of.task === setting.task && of.optimizer === setting.optimizer && of.norm === setting.norm && of.mistake === "" && of.precision === setting.precision &&
    of.norm_policy === setting.norm_policy && of.ranks === setting.ranks && !of.memory_limit_kib &&
    of.accumulation_steps > 1 === setting.accumulation_steps > 1 && total(peak) > 0;
  const known = new Map(runs.filter(isComparable).map((run) => [run.setting.micro_batch_size, total(run.peak)]));
  const sizes = [...known.keys()].sort((a, b) => a - b);
  if (sizes.length < 2) return known.get(setting.micro_batch_size) ?? null;
  const above = Math.min(sizes.length - 1, Math.max(1, sizes.findIndex((size) => size >= setting.micro_batch_size) < 0 ? sizes.length - 1 : sizes.findIndex((size) => size >= setting.micro_batch_size)));
  const [low, high] = [sizes[above - 1] as number, sizes[above] as number];
  const [from, to] = [known.get(low) ?? 0, known.get(high) ?? 0];
  return from + ((setting.micro_batch_size - low) / (high - low)) * (to - from);
}

/** Why the peak memory of a setting is not predicted. */
export function whyUnpredicted(setting: Setting): string {
  return setting.precision === "bf16" ? "bfloat16: not predicted" : "too few recordings";
}

/** What will happen to a run with a limit; null if the setting is refused, fits, or its run has finished. */
export function memoryWarning(setting: Setting, opening: Opening, forecast: number | null, finished: Run | null): string | null {
  const isOver = setting.memory_limit_kib > 0 && forecast !== null && forecast > setting.memory_limit_kib * 1024;
  if (!isOver || refusal(setting, opening) !== null || (finished && sameSetting(finished.setting, setting))) return null;
  return `About ${formatBytes(forecast, 2)} at the peak: the step will run out of memory${setting.micro_batch_size > 1 ? ", and is repeated with smaller micro-batches" : ""}.`;
}

export interface RunComparison {
  kind: "none" | "same" | "drift" | "other";
  words: string;
}

const REASONS: Record<Setting["mistake"], string> = {
  "": "",
  no_division: "gradients were summed but not divided",
  zero_each: "only the last micro-batch contributes",
  clip_each: "early gradients are clipped again and again",
  schedule_each: "the learning rate falls in every micro-batch",
  drop_tail: "samples at the end are skipped",
  mean_of_means: "micro-batches of different sizes have equal weight",
};
const POLICY_REASONS: Record<Setting["norm_policy"], string> = {
  keep: "BatchNorm averages over each micro-batch, not over the batch",
  exact: "",
  ghost: "BatchNorm averages over groups of four, the same for any split",
  freeze: "BatchNorm uses fixed running statistics",
  sync: "BatchNorm averages over one micro-batch of each rank, not over the batch",
};
const LATER = "the first update is correct; the mistake appears when a batch does not divide evenly";

/** Compare a run with the native batch by its first update, because rounding can grow to any difference later. */
export function compareWithNative(run: Run): RunComparison {
  const { mistake, precision, norm, norm_policy: policy } = run.setting;
  const rounding = precision === "bf16" ? 5e-2 : 1e-4;
  const first = run.first_update_difference;
  const last = run.relative_differences.findLast((value) => value !== null) ?? null;
  if (first === null && last === null) return { kind: "none", words: "nothing to compare yet" };
  if (first !== null && first >= rounding) {
    const why = [REASONS[mistake], norm === "batch" ? POLICY_REASONS[policy] : ""].filter((one) => one !== "").join("; and ");
    return { kind: "other", words: `different training${why ? `: ${why}` : ""}` };
  }
  if (last === null || last < rounding) return { kind: "same", words: precision === "bf16" ? "the same, up to bfloat16 rounding" : "the same, up to rounding" };
  if (mistake === "drop_tail" || mistake === "mean_of_means") return { kind: "other", words: `${LATER}: ${REASONS[mistake]}` };
  return { kind: "drift", words: "the same first update; training amplified later rounding" };
}

/** Name of the program template for a setting: the same as in guide/src/anybatch_guide/programs.py. */
export function templateOf(setting: Setting): string {
  return setting.mistake || [...(setting.norm_policy === "ghost" ? ["ghost"] : []), ...(setting.memory_limit_kib > 0 ? ["limit"] : [])].join(" ");
}

/** The program for a setting: its template with the values filled in. */
export function program(opening: Opening, setting: Setting): string {
  const template = opening.programs[templateOf(setting)] ?? "";
  const values: Record<string, string> = {
    ...Object.fromEntries(Object.entries(setting).map(([key, value]) => [key, String(value)])),
    effective_batch_size: String(effective(setting)),
    cut: cut(setting).replaceAll("×", "x"),
    launch: setting.ranks === 1 ? "python" : `torchrun --nproc-per-node ${setting.ranks}`,
    norms: setting.norm_policy === "ghost" ? `Ghost(${opening.ghost_samples})` : `"${setting.norm_policy}"`,
    limit: `${setting.memory_limit_kib} * 2**10`,
    optimizer_class: setting.optimizer === "sgd" ? "SGD" : "AdamW",
  };
  return template.replace(/\$([a-z_]+)/g, (whole_, name: string) => values[name] ?? whole_);
}

/** The command line for a setting, without default values. */
export function commandLine(setting: Setting, usual: Setting): string {
  const words = (Object.keys(usual) as (keyof Setting)[]).filter((key) => setting[key] !== usual[key]).map((key) => `${key}=${setting[key]}`);
  return ["python -m anybatch_guide.play", ...words].join(" ");
}

/** Bytes by the five categories that are drawn; small ones are merged with the most similar category. */
export function byDrawnCategory(peak: Record<string, number>): Partial<Record<Category, number>> {
  return {
    weights: (peak["weights"] ?? 0) + (peak["buffers"] ?? 0),
    gradients: peak["gradients"] ?? 0,
    optimizer: peak["optimizer"] ?? 0,
    activations: (peak["activations"] ?? 0) + (peak["inputs"] ?? 0),
    temporary: peak["temporaries"] ?? 0,
  };
}

export function total(peak: Record<string, number>): number {
  return Object.values(peak).reduce((sum, bytes) => sum + bytes, 0);
}

/** The gradient of a step as a strip: the sum so far over all ranks, in the outline of the native batch's gradient. */
export interface GradientStrip {
  step: number | null;
  sum: readonly number[];
  native: readonly number[];
  /** The latest micro-batch of each rank; empty for a recorded step. */
  seen: readonly MicroBatchDetails[];
  /** A recorded step that is filled up: how many of its micro-batches are added. */
  added?: { done: number; of: number };
}

/** The recorded gradient of a run after `added` micro-batches of its next step; with 0, of its latest step. */
export function recordedStrip({ gradients, losses }: Run, added = 0): GradientStrip | null {
  const [step, sums, native] = gradients?.findLast(([at]) => at < losses.length + Math.min(1, added)) ?? [];
  if (step === undefined || !sums || native === undefined) return null;
  const isFilling = added > 0 && step === losses.length;
  return {
    step,
    sum: signedBytes(sums.at(isFilling ? added - 1 : -1) ?? ""),
    native: signedBytes(native),
    seen: [],
    ...(isFilling ? { added: { done: added, of: sums.length } } : {}),
  };
}

const REPLAY_STEPS_PER_SECOND = 16;
const MAX_REPLAY_SECONDS = 4;
/** Seconds in which the gradient of a step fills up: of the first step, and of each later one with recorded micro-batches. */
const FILLING_SECONDS = [2, 1];

/** The place of a replay: finished steps, and micro-batches of the next one. Steps whose gradient fills up take longer. Null at the end. */
export function replayedAt(seconds: number, { gradients, losses }: Run): { steps: number; added: number } | null {
  let left = seconds;
  const pace = Math.max(REPLAY_STEPS_PER_SECOND, losses.length / MAX_REPLAY_SECONDS);
  for (let steps = 0; steps < losses.length; steps += 1) {
    const of = gradients?.find(([at]) => at === steps)?.[1].length ?? 1;
    const takes = of > 1 ? (FILLING_SECONDS[Math.min(steps, 1)] ?? 1) : 1 / pace;
    if (left < takes) return { steps, added: of > 1 ? Math.floor(((of + 1) * left) / takes) : 0 };
    left -= takes;
  }
  return null;
}

/** The gradient of the current step from the latest micro-batch of each rank. */
export function liveStrip(seen: readonly MicroBatchDetails[], natives: readonly { step: number; gradient: number[] }[]): GradientStrip {
  const step = Math.max(...seen.map((one) => one.step), natives[0]?.step ?? 0);
  const current = seen.filter((one) => one.step === step);
  const sum = (current[0]?.sum ?? []).map((_, at) => current.reduce((total, one) => total + (one.sum[at] ?? 0), 0));
  return { step: current.length ? step : null, sum, native: natives.find((native) => native.step === step)?.gradient ?? [], seen: current };
}

function signedBytes(text: string): number[] {
  return [...new Int8Array(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer)];
}

/** A run before its first step. */
export function emptyRun(setting: Setting): Run {
  return {
    setting,
    status: "running",
    losses: [],
    gradient_norms: [],
    learning_rates: [],
    relative_differences: [],
    native_losses: [],
    evaluated: [],
    accuracies: [],
    native_accuracies: [],
    answers: [],
    first_update_difference: null,
    peak: {},
    smaller_sizes: [],
    reduced_bytes: 0,
    digest: null,
    surfaces: [],
  };
}

/** The first `count` steps of a run. */
export function upTo(run: Run, count: number): Run {
  const cut = <Value>(values: Value[]): Value[] => values.slice(0, count);
  const evaluations = run.evaluated.filter((updates) => updates <= count).length;
  return {
    ...run,
    losses: cut(run.losses),
    gradient_norms: cut(run.gradient_norms),
    learning_rates: cut(run.learning_rates),
    relative_differences: cut(run.relative_differences),
    native_losses: cut(run.native_losses),
    evaluated: run.evaluated.slice(0, evaluations),
    accuracies: run.accuracies.slice(0, evaluations),
    native_accuracies: run.native_accuracies.slice(0, evaluations),
    answers: run.answers.slice(0, evaluations),
    surfaces: run.surfaces.filter(({ updates }) => updates <= count),
    ...(count < 2 ? { peak: {} } : {}),
    ...(count < 1 ? { first_update_difference: null } : {}),
  };
}

/** A run that is built line by line. */
export class RunBuilder {
  readonly run: Run;
  readonly id: string;
  made: Made | null = null;
  /** Current step and micro-batch, both from 0, and the micro-batches of the step. */
  step = 0;
  position = -1;
  of = 0;
  /** Current micro-batch of the second rank. */
  second = -1;
  /** Details of the latest micro-batch of each rank. */
  seen: MicroBatchDetails[] = [];
  /** Gradients of the native batch in the latest steps. */
  natives: { step: number; gradient: number[] }[] = [];
  /** Number of micro-batches in the current step of each rank. */
  readonly #ofRank: number[] = [];

  constructor(id: string, setting: Setting) {
    this.id = id;
    this.run = emptyRun(setting);
  }

  take(lines: readonly Line[]): void {
    for (const line of lines) this.#take(line);
  }

  #take(line: Line): void {
    const { run } = this;
    switch (line.kind) {
      case "micro_batch":
        this.#ofRank[Number(line["rank"] ?? 0)] = Number(line["num_micro_batches"]);
        if (line["rank"] === 1) {
          this.second = Number(line["position"]);
          break;
        }
        this.step = Number(line["step"]);
        this.position = Number(line["position"]);
        this.of = Number(line["num_micro_batches"]);
        break;
      case "step":
        run.losses.push(finite(line["loss"]));
        run.gradient_norms.push(finite(line["gradient_norm"]));
        run.learning_rates.push(finite((line["learning_rates"] as unknown[])[0]));
        break;
      case "guide.native":
        run.native_losses.push(finite(line["loss"]));
        if (line["gradient"]) this.natives = [...this.natives.slice(-1), { step: Number(line["step"]), gradient: line["gradient"] as number[] }];
        break;
      case "guide.evaluation":
        run.evaluated.push(Number(line["updates"]));
        run.accuracies.push(Number(line["accuracy"]));
        run.native_accuracies.push(finite(line["native_accuracy"]));
        run.answers.push(String(line["answers"]));
        break;
      case "guide.first_update":
        run.first_update_difference = finite(line["relative_difference"]);
        break;
      case "guide.micro_batch": {
        const details = line as unknown as MicroBatchDetails;
        const one = { ...details, of: this.#ofRank[details.rank] || run.setting.accumulation_steps };
        this.seen = [...this.seen.filter(({ rank }) => rank !== one.rank), one].sort((a, b) => a.rank - b.rank);
        break;
      }
      case "out_of_memory":
        if (line["micro_batch_size_after"] !== null) run.smaller_sizes.push(Number(line["micro_batch_size_after"]));
        break;
      case "reduction":
        if (line["event"] === "begin" && line["payload"] === "gradients" && line["step"] === Math.min(1, run.setting.steps - 1)) run.reduced_bytes += Number(line["num_bytes"]);
        break;
      case "guide.match":
        run.relative_differences.push(finite(line["relative_difference"]));
        break;
      case "guide.memory": {
        const bytes = line["category_bytes"] as Record<string, number>;
        if (total(bytes) > total(run.peak)) run.peak = bytes;
        break;
      }
      case "guide.surface":
        run.surfaces.push({ updates: Number(line["updates"]), values: String(line["values"]) });
        break;
      case "end":
        run.status = line["status"] as Run["status"];
        run.message = String(line["message"] ?? "");
        run.digest = (line["digest"] as string | null) ?? null;
        break;
    }
  }
}

/** Return a finite number, or null; NaN and infinity arrive as strings. */
function finite(value: unknown): number | null {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}
