/** Data of the recordings about batch size, and sums over them. */

/** A loss; infinity is written as a string, because JSON has no number for it. */
export type Loss = number | string;

export interface RateMap {
  name: string;
  epochs: number;
  batch_sizes: number[];
  rates: number[];
  /** By rate, batch size and seed. */
  losses: Loss[][][];
  best_rates: number[];
  rules: { name: string; as_good_to: number; points: { batch_size: number; learning_rate: number; losses: Loss[] }[] }[];
}

export interface Rates {
  seeds: number[];
  as_good: number;
  maps: RateMap[];
}

export const RULES: Record<string, string> = {
  none: "keep the rate",
  linear: "linear",
  sqrt: "square root",
  "sqrt, betas kept": "square root, betas kept",
  memory: "equal averaging",
  gain: "noise gain",
};

/** The mean over seeds; infinite if one of them is. */
export function mean(losses: readonly Loss[]): number {
  return losses.reduce<number>((sum, loss) => sum + Number(loss), 0) / losses.length;
}

/** The best of the tried rates at a batch size, and its loss. */
export function best(map: RateMap, size: number): { rate: number; loss: number } {
  const column = map.batch_sizes.indexOf(size);
  const losses = map.losses.map((row) => mean(row[column] ?? []));
  const at = losses.reduce((least, loss, place) => (loss < (losses[least] ?? Infinity) ? place : least), 0);
  return { rate: map.rates[at] ?? Number.NaN, loss: losses[at] ?? Number.NaN };
}

/** Steps for a batch size, as a multiple of the minimum: McCandlish et al. 2018. */
export function stepsFor(batch: number, scale: number): number {
  return 1 + scale / batch;
}

/** Samples for a batch size, as a multiple of the minimum. */
export function samplesFor(batch: number, scale: number): number {
  return 1 + batch / scale;
}

export interface LengthCut {
  cap: number;
  way: "arrival" | "sorted" | "token_budget";
  /** Lengths of the samples of each micro-batch. */
  cuts: number[][];
  gradient_error: number;
}

export interface LengthCuts {
  lengths: number[];
  caps: number[];
  fixed_tokens: number;
  ways: LengthCut[];
}

/** Tokens computed: each micro-batch is as wide as its longest sample. */
export function computed(cuts: readonly number[][]): number {
  return cuts.reduce((sum, cut) => sum + cut.length * Math.max(...cut), 0);
}

/** The part of them that is padding. */
export function padding(cuts: readonly number[][]): number {
  const all = computed(cuts);
  return 1 - cuts.flat().reduce((sum, length) => sum + length, 0) / all;
}
