/** Small drawings as single paths: a gradient as bars up and down, samples as cells. */
import { tenth } from "./curves";

/** Bars from the middle line of a box: up for positive values, down for negative ones, clamped to the box. */
export function bars(values: readonly number[], limit: number, width: number, height: number): string {
  const pitch = width / values.length;
  const thick = tenth(pitch * 0.72);
  const middle = height / 2;
  return values
    .map((value, at) => {
      const length = tenth(Math.max(-1, Math.min(1, limit > 0 ? value / limit : 0)) * (middle - 2));
      return length === 0 ? "" : `M${tenth(at * pitch + (pitch - thick) / 2)} ${tenth(middle)}h${thick}v${-length}h${-thick}z`;
    })
    .join("");
}

/** Small triangles at the edge of the box, for the bars that are longer than it. */
export function beyond(values: readonly number[], limit: number, width: number, height: number): string {
  const pitch = width / values.length;
  return values
    .map((value, at) => {
      const [x, up] = [tenth((at + 0.5) * pitch), value > 0];
      return Math.abs(value) <= limit ? "" : `M${x} ${up ? -5 : height + 5}l4 ${up ? 6 : -6}h-8z`;
    })
    .join("");
}

export interface Block {
  /** Number of the micro-batch in the drawing, from 0 on. */
  unit: number;
  rank: number;
  x: number;
  y: number;
  width: number;
  height: number;
  path: string;
}

/** Micro-batches of these sizes as blocks of cells, in a lane for each rank, each block `down` cells high. */
export function blocks(sizes: readonly number[], ranks: number, cell: number, down: number, lane: number, space: number): Block[] {
  const pitch = cell + 1;
  return Array.from({ length: ranks }, (_, rank) => {
    let x = 0;
    return sizes.map((size, at) => {
      const across = Math.ceil(size / down);
      const path = Array.from({ length: size }, (_, one) => {
        const [column, row] = [Math.floor(one / down), one % down];
        return `M${tenth(x + column * pitch)} ${tenth(rank * lane + row * pitch)}h${cell}v${cell}h${-cell}z`;
      }).join("");
      const block = { unit: rank * sizes.length + at, rank, x, y: rank * lane, width: across * pitch - 1, height: down * pitch - 1, path };
      x += across * pitch - 1 + space;
      return block;
    });
  }).flat();
}
