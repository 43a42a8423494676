/** Positions of micro-batches in a drawing: from left to right, in lines. */
export interface Block {
  cut: readonly number[];
  longest: number;
  x: number;
  y: number;
  height: number;
}

const GAP = 14;
const HEAD = 18;
const LEAST = 62; // room for its name

/** Blocks as wide as their longest sentence and as high as their number of sentences; a new line starts when a line is full. */
export function placed(cuts: readonly (readonly number[])[], unit: number, row: number, width: number): Block[] {
  const blocks: Block[] = [];
  let x = 0;
  let y = 0;
  let line = 0;
  for (const cut of cuts) {
    const longest = Math.max(...cut);
    const own = Math.max(LEAST, longest * unit);
    if (x > 0 && x + own > width) {
      x = 0;
      y += line + GAP;
      line = 0;
    }
    const height = HEAD + cut.length * row + 2;
    blocks.push({ cut, longest, x, y, height });
    x += own + GAP;
    line = Math.max(line, height);
  }
  return blocks;
}
