/** Calculated steps with buckets: the model of anybatch's forecasts (src/anybatch/planner/forecast.py), for a ring of single devices. */
import type { Forecasts, RankStep } from "./timeline";

export interface Link {
  latency_seconds: number;
  bytes_per_second: number;
}

export interface Setting {
  ranks: number;
  microBatches: number;
  /** Seconds of a micro-batch, and the part of them in the backward pass. */
  seconds: number;
  backwardShare: number;
  gradientBytes: number;
  bucketBytes: number;
  link: Link;
  /** Additional time of the last rank: 0.1 is 10%. */
  slower: number;
}

/** Seconds of an all-reduce in a ring: see `ring_all_reduce` in src/anybatch/core/collectives.py. */
export function ringSeconds(bytes: number, ranks: number, link: Link): number {
  return 2 * (ranks - 1) * (link.latency_seconds + bytes / (ranks * link.bytes_per_second));
}

/** Bytes that each rank sends in an all-reduce in a ring. */
export function ringBytes(bytes: number, ranks: number): number {
  return (2 * (ranks - 1) * bytes) / ranks;
}

/**
 * Return the step of each rank. Buckets become full at an even rate during the last backward pass. The link reduces one
 * bucket after the other, each when it is full on all ranks.
 */
export function overlappedStep({ ranks, microBatches, seconds, backwardShare, gradientBytes, bucketBytes, link, slower }: Setting): RankStep[] {
  const sizes = Array.from({ length: Math.ceil(gradientBytes / bucketBytes) }, (_, at) => Math.min(bucketBytes, gradientBytes - at * bucketBytes));
  const paces = Array.from({ length: ranks }, (_, rank) => seconds * (rank === ranks - 1 ? 1 + slower : 1));
  const full = (pace: number, bucket: number) => pace * (microBatches - backwardShare * (1 - Math.min(1, ((bucket + 1) * bucketBytes) / gradientBytes)));
  let free = 0;
  const reduced = sizes.map((bytes, bucket) => {
    const start = Math.max(free, ...paces.map((pace) => full(pace, bucket)));
    free = start + ringSeconds(bytes, ranks, link);
    return { micro_batch: microBatches - 1, bucket, bytes, start, done: free };
  });
  return paces.map((pace) => ({
    seconds: Math.max(free, pace * microBatches),
    micro_batches: Array.from({ length: microBatches }, (_, at) => ({ begin: at * pace, backward: (at + 1 - backwardShare) * pace, end: (at + 1) * pace })),
    layers: [{ layer: 0, ready: microBatches * pace }],
    buckets: reduced.map((bucket) => ({ ...bucket, sent: full(pace, bucket.bucket) })),
  }));
}

/** Return the links of the forecasts by gigabits per second, and the workload that they share. */
export function given({ forecasts }: Forecasts) {
  const { workload } = forecasts[0]!;
  return {
    workload,
    seconds: workload.micro_batch.fixed_seconds + workload.micro_batch_size * workload.micro_batch.sample_seconds,
    links: new Map(forecasts.map(({ cluster }) => [Math.round((cluster.link.bytes_per_second * 8) / 1e9), cluster.link])),
  };
}
