/** Results of the memory experiments, and how the page reads them. */
import { CATEGORIES, type Category } from "../../data/types";

/** Result of memory_wall: plans of models that fill a GPU. */
export interface Wall {
  categories: string[];
  sizes: number[];
  limits_gib: number[];
  models: WallModel[];
  opening: Opening;
}

export interface WallModel {
  name: string;
  title: string;
  sequence_length: number;
  precision: string;
  num_parameters: number;
  rows: { held: number[]; reserved: number; phase: string; operation: string }[];
  limits: { usable_bytes: number; beside_bytes: number; largest: number; why: string }[];
}

export interface Opening {
  device: string;
  effective_batch_size: number;
  total_bytes: number;
  headroom: number;
  libraries_bytes: number;
  largest: number;
  micro_batch_size: number;
  accumulation_steps: number;
  reserved_bytes: number;
  peak_bytes: number;
  held: number[];
  words: string[];
  formulas: { state: number; layers: number; logits: number };
}

/** Result of memory_limit: small models, measured with enforced limits. */
export interface Limit {
  categories: string[];
  sizes: number[];
  budgets_mib: number[];
  predicted_from: number[];
  models: LimitModel[];
}

export interface LimitModel {
  name: string;
  title: string;
  words: string;
  num_parameters: number;
  peaks: PeakRow[];
  predicted: number[];
  budgets: { largest: number; one_more: Shortage | null; shortages: (Shortage | null)[] }[];
}

export interface PeakRow {
  num_bytes: number;
  held: number[];
  phase: string;
  operation: string;
  mark: string | null;
}

export interface Shortage {
  phase: string;
  held: number[];
  message: string;
}

/** Result of memory_accumulation: one effective batch, split into smaller and smaller micro-batches. */
export interface Accumulation {
  categories: string[];
  effective: number;
  micro_sizes: number[];
  /** Batch sizes of the steps in one pass. */
  alone_sizes: number[];
  model: string;
  num_parameters: number;
  ways: StepVariant[];
}

export interface StepVariant {
  optimizer: "adamw" | "sgd";
  precision: "fp32" | "bf16";
  checkpointing: boolean;
  gradient_bytes: number;
  /** One step of the whole effective batch, in micro-batches of each size: its peak, and its number of operations. */
  cuts: PeakRow[];
  operations: number[];
  /** One step of two micro-batches, by their size. */
  twice: Record<string, PeakRow>;
  /** One step of one micro-batch of each of `alone_sizes`. */
  alone: PeakRow[];
  courses: Record<string, MemoryTimeline>;
}

/** Result of split_times: median CPU seconds of a step over the effective batch. */
export interface SplitTimes {
  processor: string;
  rounds: number;
  effective: number;
  micro_sizes: number[];
  /** In the order of `Accumulation.ways`. `seconds`: for each size; `spread`: typical range between the quartiles, relative to the median. */
  ways: { seconds: number[]; spread: number }[];
}

/** Result of gpu_results: tables of benchmarks/results. */
export interface GpuResults {
  device: string;
  memory_file: string;
  memory: { model: string; allocated: number; reserved: number; device: number }[];
  speed_file: string;
  /** Samples per second at each micro-batch size, up to the largest that fits. */
  speed: { model: string; samples: number; budget_gib: number; speeds: [size: number, perSecond: number][] }[];
}

/** Result of memory_courses. */
export interface MemoryTimelines {
  drawn: number[];
  ways: Record<string, MemoryTimeline>[];
}

/** Memory over a step: values as a first one and changes; a single one does not change. */
export interface MemoryTimeline {
  num_moments: number;
  moments: number[];
  held: number[][];
  marks: [number, string][];
}

export type CategoryBytes = Partial<Record<Category, number>>;

const DRAWN_AS: Record<string, Category> = {
  weights: "weights",
  buffers: "weights",
  gradients: "gradients",
  optimizer: "optimizer",
  inputs: "activations",
  activations: "activations",
  temporaries: "temporary",
};

/** Bytes in the five categories that are drawn: buffers are drawn with weights, and inputs with activations. */
export function byCategory(categories: readonly string[], row: readonly number[]): CategoryBytes {
  const held: CategoryBytes = {};
  categories.forEach((name, at) => {
    const own = DRAWN_AS[name];
    const bytes = row[at] ?? 0;
    if (own && bytes) held[own] = (held[own] ?? 0) + bytes;
  });
  return held;
}

export function total(held: CategoryBytes): number {
  return CATEGORIES.reduce((sum, name) => sum + (held[name] ?? 0), 0);
}

/** The category that holds most of the memory. */
export function largestPart(held: CategoryBytes): Category {
  return CATEGORIES.reduce((best, name) => ((held[name] ?? 0) > (held[best] ?? 0) ? name : best), "weights");
}

/** Rebuild values from the first value and the changes. */
export function summed(changes: readonly number[], count: number): number[] {
  let value = 0;
  const values = changes.map((change) => (value += change));
  return values.length === 1 ? Array<number>(count).fill(value) : values;
}

export interface SplitPeak {
  held: number[];
  bytes: number;
  operations: number;
  /** Whether it was counted; otherwise it follows from counted steps. */
  recorded: boolean;
}

/**
 * Peak and operations of a step of any effective batch. A sample that waits adds only its inputs to the peak, and every
 * pass adds the same operations, so other effective batches follow from the recorded ones.
 */
export function peakOfSplit(data: Accumulation, way: StepVariant, effective: number, micro: number): SplitPeak {
  const inputs = data.categories.indexOf("inputs");
  const alone = way.alone[data.alone_sizes.indexOf(micro)];
  const perSample = (alone?.held[inputs] ?? 0) / micro;
  const twice = way.twice[String(micro)];
  const row = micro === effective ? alone : (twice ?? way.cuts[data.micro_sizes.indexOf(micro)]);
  const counted = micro === effective ? effective : twice ? 2 * micro : data.effective;
  const waiting = (effective - counted) * perSample;
  const passes = effective / micro;
  const operations = way.operations[data.micro_sizes.indexOf(data.effective / passes)];
  const [before = 0, last = 0] = way.operations.slice(-2);
  return {
    held: (row?.held ?? []).map((bytes, at) => (at === inputs ? bytes + waiting : bytes)),
    bytes: (row?.num_bytes ?? 0) + waiting,
    operations: operations ?? last + ((last - before) * (passes - data.effective)) / (data.effective / 2),
    recorded: waiting === 0 && operations !== undefined,
  };
}

/** CPU seconds of a step: measured for one effective batch, and as long per sample in others. Larger micro-batches count as the largest timed one. */
export function secondsOfSplit(times: SplitTimes, way: number, effective: number, micro: number): number {
  const timed = times.micro_sizes.indexOf(Math.min(micro, times.effective));
  return ((times.ways[way]?.seconds[timed] ?? Number.NaN) * effective) / times.effective;
}

/** Return a memory course as stacked layers. */
export function layersOf(categories: readonly string[], course: MemoryTimeline): { moments: number[]; layers: Record<Category, number[]> } {
  const moments = summed(course.moments, course.moments.length);
  const layers = Object.fromEntries(CATEGORIES.map((name) => [name, moments.map(() => 0)])) as Record<Category, number[]>;
  categories.forEach((name, at) => {
    const own = DRAWN_AS[name];
    if (!own) return;
    summed(course.held[at] ?? [0], moments.length).forEach((bytes, place) => (layers[own][place]! += bytes));
  });
  return { moments, layers };
}

/** The name of a category for use within a sentence. */
export function categoryName(name: Category): string {
  return name === "optimizer" ? "the optimizer's state" : name === "temporary" ? "temporary tensors" : name;
}
