/** 64 samples as a square that splits: micro-batches are blocks of neighbours that move apart. */

export const SIDE = 8;
const CELL = 17;
const PITCH = 19;
const PART_GAP = 5;

export interface Cell {
  x: number;
  y: number;
  /** Index of its micro-batch. */
  part: number;
}

/** Columns and rows of a block: 16 samples are 4 × 4, 8 are 4 × 2. */
export function blockOf(samples: number): { across: number; down: number } {
  const power = Math.round(Math.log2(samples));
  return { across: 2 ** Math.ceil(power / 2), down: 2 ** Math.floor(power / 2) };
}

/** The cells of 64 samples in micro-batches of a power of two, centred in a square of `room`. */
export function cells(samples: number, room = 190): Cell[] {
  const { across, down } = blockOf(samples);
  const extent = (block: number) => SIDE * PITCH - (PITCH - CELL) + (SIDE / block - 1) * PART_GAP;
  const [left, top] = [(room - extent(across)) / 2, (room - extent(down)) / 2];
  return Array.from({ length: SIDE * SIDE }, (_, sample) => {
    const [column, row] = [everySecondBit(sample), everySecondBit(sample >> 1)];
    return {
      x: left + column * PITCH + Math.floor(column / across) * PART_GAP,
      y: top + row * PITCH + Math.floor(row / down) * PART_GAP,
      part: Math.floor(sample / samples),
    };
  });
}

/** Bits 0, 2 and 4: along them, any power of two of neighbours is a block (Morton's order). */
function everySecondBit(number: number): number {
  return (number & 1) | ((number >> 1) & 2) | ((number >> 2) & 4);
}
