/** The recording that the scene shows, and values that are computed from it once. */
import { cells, type Cell } from "../math/halving";
import { clamp, ramp, smooth } from "./easing";

/** [bytes, fill, event of the allocation, event of the free or -1, block of the network or -1] */
type Piece = [number, number, number, number, number];

/** Three steps of training in one split; moments are events of the first step. */
export interface Split {
  sizes: number[];
  pieces: Piece[];
  forward: number[];
  backward: number[];
  done: number[];
  /** For each micro-batch, the moment at which the backward enters each block. */
  returns: number[][];
  update: number;
  zero: number;
  end: number;
  peak: number;
  at_peak: number[];
  /** In thousandths: for each step and micro-batch, the sum after it. */
  sums: number[][][];
  losses: number[];
  gradient_error: number;
}

export interface SceneData {
  limit: number;
  digits: string;
  weights: number[][];
  /** In thousandths. */
  gradients: number[][];
  losses: number[];
  state: [number, number];
  splits: Split[];
}

export const MIB = 2 ** 20;
export const BATCH = 64;
export const FILLS = ["weights", "optimizer", "gradients", "activations", "temporary"] as const;
export const NUM_BLOCKS = 4;

/** The name of a split, as "16 × 4" or "24 + 24 + 16". */
export function nameOf(sizes: readonly number[]): string {
  return new Set(sizes).size > 1 ? sizes.join(" + ") : `${sizes[0]} × ${sizes.length}`;
}

/** The memory of a step as an allocator sees it, with a limit. */
export class MemoryTimeline {
  readonly split: Split;
  /** Bytes after each event. */
  readonly totals: number[];
  /** The event at which memory runs out, or -1. */
  readonly refusedAt: number;
  readonly #state: readonly [number, number];
  /** The bytes that the first micro-batch keeps in each block. */
  readonly #largest: number[];

  constructor(split: Split, state: readonly [number, number], limit: number) {
    this.split = split;
    this.#state = state;
    this.totals = Array.from({ length: split.end + 1 }, (_, moment) =>
      split.pieces.reduce((sum, [bytes, , taken, freed]) => sum + (taken <= moment && (freed < 0 || freed > moment) ? bytes : 0), state[0] + state[1]),
    );
    this.refusedAt = this.totals.findIndex((total) => total > limit);
    const until = split.backward[0] ?? 0;
    this.#largest = Array.from({ length: NUM_BLOCKS }, (_, block) => split.pieces.reduce((sum, piece) => sum + (piece[4] === block && piece[2] <= until ? piece[0] : 0), 0));
  }

  /** The largest total up to a moment. */
  peakBefore(moment: number): number {
    return Math.max(...this.totals.slice(0, Math.max(1, Math.floor(moment))));
  }

  get peakMoment(): number {
    return this.totals.indexOf(Math.max(...this.totals));
  }

  /** The memory at a moment between two events; pieces fade in and out. With `exact`, just after an event. */
  at(moment: number, options: { scale?: number; exact?: boolean } = {}): Memory {
    const { scale = 1, exact = false } = options;
    const held = [this.#state[0], this.#state[1], 0, 0, 0];
    const bands: Band[] = [];
    const blocks = Array.from({ length: NUM_BLOCKS }, () => 0);
    const sent: Memory["sent"] = [];
    this.split.pieces.forEach(([bytes, fill, taken, freed, block], order) => {
      if (this.refusedAt >= 0 && taken >= this.refusedAt) return;
      const arrived = smooth(ramp(moment, taken - 1.2, taken + 1));
      const left = freed < 0 ? 0 : smooth(ramp(moment, freed - 1.2, freed + 1));
      const there = (exact ? Number(taken <= moment && (freed < 0 || freed > moment)) : arrived * (1 - left)) * scale;
      const way = ramp(moment, taken - 1.2, taken + 1);
      if (block >= 0 && scale === 1 && way > 0 && way < 1) sent.push({ block, way, bytes });
      if (there <= 0) return;
      held[fill] = (held[fill] ?? 0) + bytes * there;
      bands.push({ fill, bytes: bytes * there, order });
      if (block >= 0) blocks[block] = (blocks[block] ?? 0) + bytes * there;
    });
    bands.sort((a, b) => a.fill - b.fill || a.order - b.order);
    const lit = blocks.map((own, block) => clamp(own / (this.#largest[block] || 1)));
    return { held, bands, lit, sent, total: held.reduce((a, b) => a + b) };
  }
}

export interface Band {
  fill: number;
  bytes: number;
  order: number;
}

export interface Memory {
  /** Bytes by fill. */
  held: number[];
  bands: Band[];
  /** How much of its activations each block holds, from 0 to 1. */
  lit: number[];
  /** Activations on their way from a block into memory. */
  sent: { block: number; way: number; bytes: number }[];
  total: number;
}

/** Where a sample is in the square of 8 x 8, and how many gaps are before its column and row. */
export interface Home {
  column: number;
  row: number;
  gapsBefore: readonly [number, number];
  part: number;
}

/** The places of the 64 samples, so that each micro-batch is a block; and the number of gaps in each direction. */
export function homesOf(sizes: readonly number[]): { homes: Home[]; gaps: readonly [number, number] } {
  const first = sizes[0] ?? BATCH;
  if (new Set(sizes).size === 1) {
    const drawn = cells(first);
    const columns = [...new Set(drawn.map(({ x }) => x))].sort((a, b) => a - b);
    const rows = [...new Set(drawn.map(({ y }) => y))].sort((a, b) => a - b);
    const across = 2 ** Math.ceil(Math.log2(first) / 2);
    const down = first / across;
    const homes = drawn.map(({ x, y, part }: Cell) => {
      const [column, row] = [columns.indexOf(x), rows.indexOf(y)];
      return { column, row, part, gapsBefore: [Math.floor(column / across), Math.floor(row / down)] as const };
    });
    return { homes, gaps: [8 / across - 1, 8 / down - 1] };
  }
  const ends = sizes.map((_, at) => sizes.slice(0, at + 1).reduce((a, b) => a + b));
  const homes = Array.from({ length: BATCH }, (_, sample) => {
    const part = ends.findIndex((end) => sample < end);
    return { column: sample % 8, row: Math.floor(sample / 8), part, gapsBefore: [0, part] as const };
  });
  return { homes, gaps: [0, sizes.length - 1] };
}

/** Grey values from 0 to 1, 64 for each of the 192 images. */
export function greys(text: string): number[] {
  return [...text].map((figure) => Number(figure) / 7);
}
