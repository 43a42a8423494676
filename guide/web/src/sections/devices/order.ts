/** Steps with sharded weights, in two orders: see guide/src/anybatch_guide/experiments/layer_order.py. */
import { tenth } from "../../math/curves";

/** Phase, block, micro-batch, and whether the block's weights were gathered for it. */
export type Visit = ["forward" | "backward", number, number, boolean];

export interface BothOrders {
  blocks: number;
  steps: {
    order: "micro_batches" | "layers";
    num_micro_batches: number;
    gathered_bytes: number;
    reduced_bytes: number;
    kept_bytes: number;
    waiting_bytes: number;
    visits: Visit[];
  }[];
}

export const ORDERS = [
  { order: "micro_batches", name: "micro-batch by micro-batch" },
  { order: "layers", name: "layer by layer" },
] as const;

export function stepOf(steps: BothOrders["steps"], order: BothOrders["steps"][0]["order"], number: number): BothOrders["steps"][0] {
  const step = steps.find((one) => one.order === order && one.num_micro_batches === number);
  if (!step) throw new Error(`no step of ${number} micro-batches by ${order} was recorded`);
  return step;
}

/** A micro-batch's cells as one path: a column for each visit, a row for each block, the first block at the bottom. */
export function cells(visits: readonly Visit[], number: number, at: { width: number; top: number; row: number; blocks: number }): string {
  const long = at.width / visits.length;
  return visits
    .map(([, block, one], column) => (one === number ? `M${tenth(column * long)} ${at.top + (at.blocks - 1 - block) * at.row}h${tenth(long - 1)}v${at.row - 2}h-${tenth(long - 1)}z` : ""))
    .join("");
}

/** A tick below each visit that gathers its block first. */
export function gathers(visits: readonly Visit[], width: number, y: number): string {
  const long = width / visits.length;
  return visits.map(([, , , gathered], column) => (gathered ? `M${tenth((column + 0.5) * long)} ${y}v8` : "")).join("");
}
