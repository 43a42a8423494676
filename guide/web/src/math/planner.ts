/**
 * Plans from tables: Python traced the steps, replayed the allocator and tabulated the results (anybatch_guide/memory/tables.py).
 *
 * This module sums recorded lines `a + b m` in the micro-batch size `m`, and chooses a row. A
 * test compares a thousand plans with Python's, number by number. All are bytes below 2^53, so none is ever rounded.
 */

/** Data of the memory_planner recording. */
export interface PlannerData {
  /** Named devices, and devices named after their size: "24GiB". */
  devices: { name: string; memory_bytes: number }[];
  num_ranks: number[];
  effective_batch_sizes: number[];
  headroom: number;
  context_bytes: number;
  communicator_bytes: number;
  workspace_bytes: number;
  categories: string[];
  phases: string[];
  variants: VariantData[];
}

/** A piece of the peak: its first micro-batch size, its phase and operation, and the memory by category. */
export type Piece = [from: number, phase: number, operation: string, constants: number[], slopes: number[]];

export interface VariantData {
  model: string;
  sequence_length: number;
  precision: string;
  optimizer: string;
  checkpointing: boolean;
  several: boolean;
  num_parameters: number;
  /** Of every step but the first. */
  steady: Piece[];
  first: Piece[];
  /** For each device, the largest micro-batch size that fits; null for no limit. */
  largest: (number | null)[];
  /** Bytes that the allocator reserves, for each possible size. */
  reserved_mebibytes: [size: number, mebibytes: number][];
}

export interface Peak {
  bytes: number;
  /** In the order of the recording's categories. */
  held: number[];
  phase: string;
  operation: string;
}

export interface Budget {
  /** Empty if the device is named after its size. */
  name: string;
  total: number;
  headroom: number;
  outside: number;
  workspace: number;
  usable: number;
}

export type Binding = "tensors" | "allocator" | "optimizer step" | "batch";

export interface Plan {
  variant: VariantData;
  budget: Budget;
  effective: number;
  ranks: number;
  /** The largest micro-batch size that keeps the headroom; 0 if not even one sample fits. */
  largest: number;
  /** The size to use: the share in even parts of at most that size. */
  size: number;
  steps: number;
  peak: Peak;
  reserved: number;
  binds: Binding;
  /** Largest size whose tensors alone fit; null for no limit. */
  largestOfTensors: number | null;
  /** Tensors' peak with one sample more than the largest. */
  oneMore: number;
}

export interface PlanRequest {
  device: string;
  effective: number;
  ranks: number;
}

const MEBIBYTE = 2 ** 20;

/** The tabulated numbers of ranks and effective batch sizes; a test compares them with the recording. */
export const NUM_RANKS = [1, 2, 3, 4, 6, 8, 16, 32, 64];
export const EFFECTIVE_BATCH_SIZES = Array.from({ length: 13 }, (_, power) => 2 ** power);

/** The part of a plan that fits: the result of `fit_of` in the planner. */
export function plan(data: PlannerData, variant: VariantData, { device, effective, ranks }: PlanRequest): Plan {
  const row = data.devices.findIndex((one) => one.name === device);
  const budget = budgetOf(data, row, ranks);
  const share = Math.ceil(effective / ranks);
  const largest = Math.min(share, variant.largest[row] ?? share);
  const size = evenSize(share, Math.max(1, largest));
  const highest = higher(variant, size);
  const free = reservedBytes(variant, size);
  return {
    variant,
    budget,
    effective,
    ranks,
    largest,
    size,
    steps: Math.ceil(share / size),
    peak: peakOf(data, highest, size),
    reserved: largest ? Math.max(peakBytes(highest, size), Math.min(free, budget.total - budget.outside - budget.workspace)) : free,
    binds: binding(data, variant, largest, budget.usable, share),
    largestOfTensors: largestOfTensors(highest, budget.usable),
    oneMore: peakBytes(highest, largest + 1),
  };
}

/** The memory that a step may take: src/anybatch/planner/budget.py. */
function budgetOf(data: PlannerData, row: number, ranks: number): Budget {
  const { name, memory_bytes: total } = data.devices[row]!;
  const outside = data.context_bytes + (ranks > 1 ? data.communicator_bytes : 0);
  const { headroom, workspace_bytes: workspace } = data;
  const usable = Math.trunc(total * (1 - headroom)) - outside - workspace;
  return { name: /^\d+GiB$/.test(name) ? "" : name, total, headroom, outside, workspace, usable };
}

/** The size that splits a share into the fewest parts of at most `limit`, as evenly as possible. */
export function evenSize(share: number, limit: number): number {
  return Math.ceil(share / Math.ceil(share / Math.max(1, limit)));
}

function reservedBytes(variant: VariantData, size: number): number {
  const found = variant.reserved_mebibytes.find(([own]) => own === size);
  if (!found) throw new Error(`nothing is recorded of ${variant.model} in micro-batches of ${size}`);
  return found[1] * MEBIBYTE;
}

/** Of the two kinds of step, the one whose tensors hold more. */
function higher({ steady, first }: VariantData, size: number): Piece[] {
  return peakBytes(steady, size) >= peakBytes(first, size) ? steady : first;
}

/** The peak, and the memory by category at the peak. */
function peakOf(data: PlannerData, pieces: Piece[], size: number): Peak {
  const [, phase, operation, constants, slopes] = pieces.findLast(([from]) => from <= size)!;
  const held = constants.map((constant, at) => constant + slopes[at]! * size);
  return { bytes: sum(held), held, phase: data.phases[phase]!, operation };
}

function peakBytes(pieces: Piece[], size: number): number {
  const [, , , constants, slopes] = pieces.findLast(([from]) => from <= size)!;
  return sum(constants) + sum(slopes) * size;
}

/** The largest size at which every piece, and so the peak, is within the budget; null for no limit. */
function largestOfTensors(pieces: Piece[], budget: number): number | null {
  if (peakBytes(pieces, 1) > budget) return 0;
  const limits = pieces
    .filter(([, , , , slopes]) => sum(slopes) > 0)
    .map(([, , , constants, slopes]) => Math.floor((budget - sum(constants)) / sum(slopes)));
  return limits.length ? Math.min(...limits) : null;
}

/** The reason why the next larger micro-batch size does not fit. */
function binding(data: PlannerData, variant: VariantData, size: number, usable: number, share: number): Binding {
  if (size >= share) return "batch";
  const next = peakOf(data, higher(variant, size + 1), size + 1);
  if (next.bytes <= usable) return "allocator";
  return next.phase === "update" ? "optimizer step" : "tensors";
}

function sum(numbers: readonly number[]): number {
  return numbers.reduce((all, one) => all + one, 0);
}
