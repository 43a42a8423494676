/** One data-parallel step, number by number: see guide/src/anybatch_guide/experiments/ddp_step.py. */

export interface RankNumbers {
  initial: number[];
  broadcast: number[];
  /** The accumulated gradient after each micro-batch. */
  gradients: number[][];
  hops: { chunk: number; sent: number[]; bytes: number; after: number[] }[];
  all_reduce: number[];
  updated: number[];
}

export interface DdpStep {
  num_micro_batches: number;
  micro_batch_size: number;
  item_bytes: number;
  ranks: RankNumbers[];
  full_batch: number[];
  sampler: { share: number; same_without: number; same_with: number };
}

export type Kind = "ready" | "broadcast" | "backward" | "reduce-scatter" | "all-gather" | "update";

/** Chunk of a gradient: its numbers, and the ranks whose gradients are in them. */
export interface Chunk {
  values: number[];
  ranks: boolean[];
}

export interface Moment {
  kind: Kind;
  /** Which of the moments of this kind, from 1. */
  number: number;
  of: number;
  ranks: { weights: number[]; micro_batches: number; chunks: Chunk[]; sentBytes: number }[];
}

/** A chunk on its way in a hop: `from` sends it to `to`. */
export interface Flight {
  chunk: number;
  from: number;
  to: number;
  content: Chunk;
}

/** Return all moments of the step; between two moments, one message or one computation takes place. */
export function momentsOf({ ranks, num_micro_batches }: DdpStep): Moment[] {
  const count = ranks.length;
  const only = (one: number) => ranks.map((_, rank) => rank === one);
  const state = (weights: (rank: RankNumbers) => number[], micro_batches: number, gradient: (rank: RankNumbers) => number[] | undefined) =>
    ranks.map((rank, number) => ({
      weights: weights(rank),
      micro_batches,
      chunks: cut(gradient(rank), count).map((values) => ({ values, ranks: values.length ? only(number) : ranks.map(() => false) })),
      sentBytes: 0,
    }));
  const moments: Moment[] = [
    { kind: "ready", number: 1, of: 1, ranks: state((rank) => rank.initial, 0, () => undefined) },
    { kind: "broadcast", number: 1, of: 1, ranks: state((rank) => rank.broadcast, 0, () => undefined) },
  ];
  for (let done = 1; done <= num_micro_batches; done += 1)
    moments.push({ kind: "backward", number: done, of: num_micro_batches, ranks: state((rank) => rank.broadcast, done, (rank) => rank.gradients[done - 1]) });
  for (let hop = 0; hop < 2 * (count - 1); hop += 1) {
    const adds = hop < count - 1;
    const before = moments.at(-1)!.ranks;
    moments.push({ kind: adds ? "reduce-scatter" : "all-gather", number: (hop % (count - 1)) + 1, of: count - 1, ranks: before.map((_, to) => received(ranks, before, hop, to, adds)) });
  }
  const last = moments.at(-1)!.ranks;
  moments.push({ kind: "update", number: 1, of: 1, ranks: last.map((rank, number) => ({ ...rank, weights: ranks[number]!.updated })) });
  return moments;
}

/** Return a rank after a hop. Its numbers are recorded; whose gradients are in a chunk follows from the messages. */
function received(ranks: RankNumbers[], before: Moment["ranks"], hop: number, to: number, adds: boolean): Moment["ranks"][0] {
  const from = (to + ranks.length - 1) % ranks.length;
  const { chunk } = ranks[from]!.hops[hop]!;
  const own = before[to]!;
  const values = cut(ranks[to]!.hops[hop]!.after, ranks.length);
  return {
    ...own,
    chunks: own.chunks.map((one, number) => ({ values: values[number]!, ranks: number === chunk ? before[from]!.chunks[chunk]!.ranks.map((is, rank) => is || (adds && one.ranks[rank]!)) : one.ranks })),
    sentBytes: own.sentBytes + ranks[to]!.hops[hop]!.bytes,
  };
}

/** Return the chunks that travel between moments `at` and `at + 1`. */
export function flightsOf({ ranks }: DdpStep, moments: readonly Moment[], at: number): Flight[] {
  const hop = moments.slice(0, at + 1).filter(({ kind }) => kind === "reduce-scatter" || kind === "all-gather").length;
  const next = moments[at + 1]?.kind;
  if (next !== "reduce-scatter" && next !== "all-gather") return [];
  return ranks.map(({ hops }, from) => {
    const { chunk } = hops[hop]!;
    return { chunk, from, to: (from + 1) % ranks.length, content: moments[at]!.ranks[from]!.chunks[chunk]! };
  });
}

/** Cut a vector into equal chunks; chunks of a missing vector are empty. */
export function cut(vector: readonly number[] | undefined, count: number): number[][] {
  const long = (vector?.length ?? 0) / count;
  return Array.from({ length: count }, (_, at) => vector?.slice(at * long, (at + 1) * long) ?? []);
}

/** Return the step of DDP, from 0, that leads to a moment. */
export function partOf(kind: Kind): number {
  return { ready: 0, broadcast: 0, backward: 1, "reduce-scatter": 2, "all-gather": 2, update: 3 }[kind];
}

/** Say what happens on the way to a moment. */
export function describe({ kind, number, of }: Moment): string {
  switch (kind) {
    case "ready":
      return "Ready: the ranks have different weights and no gradients.";
    case "broadcast":
      return "Broadcast: all ranks now have the weights of rank 0.";
    case "backward":
      return `Backward ${number} of ${of}: each rank adds the gradient of a micro-batch to its own p.grad. Nothing travels.`;
    case "reduce-scatter":
      return `Reduce-scatter, hop ${number} of ${of}: each rank passes a chunk to the next rank, which adds it to its own.${number === of ? " Each rank now has one complete chunk." : ""}`;
    case "all-gather":
      return `All-gather, hop ${number} of ${of}: complete chunks travel on and replace partial sums.${number === of ? " All ranks have the same gradient." : ""}`;
    case "update":
      return "Update: the same gradient and the same weights give the same step on every rank.";
  }
}
