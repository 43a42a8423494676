/** What the recordings of several devices hold, and sums over them: see guide/src/anybatch_guide/experiments. */

export interface Bucket {
  micro_batch: number;
  bucket: number;
  bytes: number;
  sent: number;
  done: number;
}

/** One step on one rank, in seconds from its beginning. */
export interface RankStep {
  seconds: number;
  micro_batches: { begin: number; end: number }[];
  /** When the gradient of each layer was final, in the last backward. */
  layers: { layer: number; ready: number }[];
  buckets: Bucket[];
}

export interface Timeline {
  num_micro_batches: number;
  num_layers: number;
  worlds: { num_ranks: number; ways: Record<string, RankStep[]> }[];
}

/** Bytes that a rank hands to reductions in its step. */
export function sentBytes(rank: RankStep): number {
  return rank.buckets.reduce((sum, bucket) => sum + bucket.bytes, 0);
}

/** From where to where the last backward is over and reductions are not: what no computation hides. */
export function exposed(rank: RankStep): { from: number; to: number } {
  const from = Math.max(...rank.layers.map((layer) => layer.ready));
  return { from, to: Math.max(from, ...rank.buckets.map((bucket) => bucket.done)) };
}

/** The longest of them. */
export function longestExposed(ranks: readonly RankStep[]): number {
  return Math.max(...ranks.map((rank) => exposed(rank).to - exposed(rank).from));
}

/** How long the slowest rank took. */
export function slowest(ranks: readonly RankStep[]): number {
  return Math.max(...ranks.map((rank) => rank.seconds));
}

/** Numbers that a program printed behind a word: the first one, as text has it. */
export function printed(output: string, line: RegExp): number {
  const found = line.exec(output)?.[1];
  if (found === undefined) throw new Error(`nothing like ${line} was printed`);
  return Number(found);
}

export interface ForecastRow {
  world_size: number;
  step_seconds: number;
  samples_per_second: number;
  efficiency: number;
  compute_seconds: number;
  exposed_seconds: number;
  control_seconds: number;
  update_seconds: number;
}

export interface Forecast {
  link: string;
  strategy: string;
  scaling: "strong" | "weak";
  workload: { accumulation_steps: number | null; effective_batch_size: number; micro_batch_size: number; gradient_bytes: number };
  rows: ForecastRow[];
  largest_useful: number | null;
  why: string;
  unvalidated: string[];
}

export interface Forecasts {
  inner_link: string;
  devices_per_host: number;
  forecasts: Forecast[];
}

/** Networks in the order in which they were forecast. */
export function links(all: Forecasts): string[] {
  return [...new Set(all.forecasts.map((one) => one.link))];
}

/** What varies between forecasts of one network: the strategy where the batch stays, micro-batches where it grows. */
export function nameOf(one: Forecast): string {
  if (one.scaling === "strong") return one.strategy;
  const steps = one.workload.accumulation_steps ?? 1;
  return `${steps} micro-batch${steps === 1 ? "" : "es"} a step`;
}
