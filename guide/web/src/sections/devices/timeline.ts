/** Data of the recordings about several devices, and sums over them: see guide/src/anybatch_guide/experiments. */

export interface Bucket {
  micro_batch: number;
  bucket: number;
  bytes: number;
  sent: number;
  /** When the link was free for it; unknown in recordings. */
  start?: number;
  done: number;
}

/** One step on one rank, in seconds from its start. */
export interface RankStep {
  seconds: number;
  micro_batches: { begin: number; backward?: number; end: number }[];
  /** When the gradient of each layer was complete, in the last backward pass. */
  layers: { layer: number; ready: number }[];
  buckets: Bucket[];
}

export interface Timeline {
  num_micro_batches: number;
  worlds: { num_ranks: number; ways: Record<string, RankStep[]> }[];
}

/** Bytes that a rank hands to reductions in its step. */
export function sentBytes(rank: RankStep): number {
  return rank.buckets.reduce((sum, bucket) => sum + bucket.bytes, 0);
}

/** Exposed communication: from the end of the last backward pass to the end of the last reduction. */
export function exposed(rank: RankStep): { from: number; to: number } {
  const from = Math.max(...rank.layers.map((layer) => layer.ready));
  return { from, to: Math.max(from, ...rank.buckets.map((bucket) => bucket.done)) };
}

/**
 * Split the exposed time of a rank at the moment when the last other rank has sent its last bucket: before it, a faster link saves nothing.
 * The clocks of the ranks start at a barrier.
 */
export function split(rank: RankStep, ranks: readonly RankStep[]): { from: number; sent: number; to: number; waiting: number; transfer: number } {
  const { from, to } = exposed(rank);
  const others = ranks.filter((other) => other !== rank).flatMap((other) => other.buckets.map((bucket) => bucket.sent));
  const sent = Math.min(to, Math.max(from, ...others));
  return { from, sent, to, waiting: sent - from, transfer: to - sent };
}

/** Return when the last rank has sent a bucket: until then, the others wait. */
export function met(bucket: Bucket, ranks: readonly RankStep[]): number {
  const same = ranks.flatMap(({ buckets }) => buckets.filter((other) => other.bucket === bucket.bucket && other.micro_batch === bucket.micro_batch));
  return Math.min(bucket.done, Math.max(...same.map(({ sent }) => sent)));
}

/** Seconds of the slowest rank. */
export function slowest(ranks: readonly RankStep[]): number {
  return Math.max(...ranks.map((rank) => rank.seconds));
}

/** Return the first number that `line` captures in the output of a program. */
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
}

export interface Forecast {
  link: string;
  strategy: string;
  scaling: "strong" | "weak";
  workload: {
    accumulation_steps: number | null;
    effective_batch_size: number;
    micro_batch: { fixed_seconds: number; sample_seconds: number };
    micro_batch_size: number;
    gradient_bytes: number;
    backward_share: number;
  };
  cluster: { link: { latency_seconds: number; bytes_per_second: number } };
  rows: ForecastRow[];
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

/** Name of a forecast: the strategy for a fixed batch, the number of micro-batches for a growing batch. */
export function nameOf(one: Forecast): string {
  if (one.scaling === "strong") return { all_reduce: "DDP", zero1: "ZeRO-1", fsdp: "FSDP" }[one.strategy] ?? one.strategy;
  const steps = one.workload.accumulation_steps ?? 1;
  return `${steps} micro-batch${steps === 1 ? "" : "es"} per step`;
}
