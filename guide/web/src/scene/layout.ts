/** Where things are in the stage: side by side on wide screens, on top of each other on narrow ones. */
import { MIB } from "./data";

interface Box {
  x: number;
  y: number;
  w: number;
  h: number;
}

export interface Layout {
  wide: boolean;
  W: number;
  H: number;
  /** The square of 64 samples. */
  grid: { x: number; y: number; cell: number; gap: number; split: number; size: number };
  gpu: Box;
  limitY: number;
  /** The stack of memory; `base` is its bottom and `scale` its height per MiB. */
  tank: { x: number; w: number; base: number; scale: number };
  /** Right end of the names next to the stack. */
  labels: number;
  /** Place of labels of the unsplit batch and of the limit. */
  side: { x: number; anchor: "start" | "end" };
  /** Middle and width of the area for samples in the GPU. */
  tray: { x: number; y: number; size: number };
  /** One plate per block of the network. */
  plates: Box[];
  loss: Box;
  gradient: Box;
  weights: Box;
}

export const LIMITS = { least: 1.4, most: 4.4 };
/** From this width on, things are side by side. */
export const WIDE = 780;
const NARROWEST = 240; // a figure that is not drawn has no width
const PLATE_HEIGHTS = [118, 92, 92, 52];

export function layoutOf(W: number, limitBytes: number): Layout {
  return W >= WIDE ? wideLayout(W, limitBytes / MIB) : narrowLayout(Math.max(NARROWEST, W), limitBytes / MIB);
}

function wideLayout(W: number, limit: number): Layout {
  const big = W >= 940;
  const [base, scale] = [302, 66];
  const limitY = base - limit * scale;
  const fit = Math.min(1, (base - limitY) / 172);
  const cell = big ? 26 : 23;
  const grid = { x: 0, y: 0, cell, gap: 3, split: 12, size: 8 * cell + 7 * 3 + 12 };
  grid.y = base - grid.size;
  const gpuX = grid.size + (big ? 34 : 18);
  const tray = { x: 0, y: 0, size: (big ? 124 : 106) * fit };
  const traySlot = big ? 124 : 106;
  tray.x = gpuX + 16 + traySlot / 2;
  const platesX = gpuX + 16 + traySlot + (big ? 22 : 16);
  const [plateW, plateGap] = [8, big ? 9 : 5];
  const platesW = 4 * plateW + 3 * plateGap;
  const labels = platesX + platesW + (big ? 122 : 104);
  const tank = { x: labels + 8, w: big ? 78 : 56, base, scale };
  const gpu = { x: gpuX, y: limitY, w: tank.x + tank.w + 14 - gpuX, h: base + 10 - limitY };
  const middle = limitY + (base - limitY) * 0.54;
  tray.y = middle;
  const x = gpu.x + gpu.w + (big ? 54 : 34);
  const w = W - x;
  return {
    wide: true,
    W,
    H: base + 18,
    grid,
    gpu,
    limitY,
    tank,
    labels,
    side: { x: tank.x - 9, anchor: "end" },
    tray,
    plates: PLATE_HEIGHTS.map((height, at) => ({ x: platesX + at * (plateW + plateGap), y: middle - (height * fit) / 2, w: plateW, h: height * fit })),
    loss: { x, y: 24, w, h: 58 },
    gradient: { x, y: 132, w, h: 58 },
    weights: { x, y: 246, w, h: 56 },
  };
}

function narrowLayout(W: number, limit: number): Layout {
  const f = Math.min(1.7, Math.max(0.9, W / 327));
  const scale = 46 * f;
  const grid = { x: 0, y: 20, cell: 12 * f, gap: 2 * f, split: 6 * f, size: 116 * f };
  const base = grid.y + grid.size + 14 + LIMITS.most * scale;
  const limitY = base - limit * scale;
  const fit = Math.min(1, (base - limitY) / (118 * f));
  const tank = { x: 104, w: 50 * f, base, scale };
  const middle = limitY + (base - limitY) * 0.6;
  const platesX = W - 14 - 41 * f;
  const x = grid.size + 22;
  return {
    wide: false,
    W,
    H: base + 12,
    grid,
    gpu: { x: 0, y: limitY, w: W, h: base + 10 - limitY },
    limitY,
    tank,
    labels: 98,
    side: { x: tank.x + tank.w + 8, anchor: "start" },
    tray: { x: (tank.x + tank.w + platesX) / 2, y: middle, size: 74 * f * fit },
    plates: PLATE_HEIGHTS.map((height, at) => {
      const h = height * 0.64 * f * fit;
      return { x: platesX + at * 11 * f, y: middle - h / 2, w: 7 * f, h };
    }),
    gradient: { x, y: 20, w: W - x, h: 40 * f },
    weights: { x, y: 20 + 40 * f + 40, w: W - x, h: 30 * f },
    loss: { x: 0, y: 0, w: 0, h: 0 },
  };
}

/** The middle of a sample's place in the square. */
export function homeOf(L: Layout, place: { column: number; row: number; gapsBefore: readonly [number, number] }, gaps: readonly [number, number], apart: number): [number, number] {
  const { grid } = L;
  const step = grid.cell + grid.gap;
  const along = (at: number, before: number, number: number, start: number) => {
    const gap = number ? grid.split / number : 0;
    return start + (grid.split / 2) * (1 - (number ? apart : 0)) + at * step + before * gap * apart + grid.cell / 2;
  };
  return [along(place.column, place.gapsBefore[0], gaps[0], grid.x), along(place.row, place.gapsBefore[1], gaps[1], grid.y)];
}

/** The middle and size of a sample in the GPU. */
export function seatOf(L: Layout, seat: number, seats: number): [number, number, number] {
  const across = Math.ceil(Math.sqrt(seats));
  const down = Math.ceil(seats / across);
  const pitch = Math.min(L.tray.size / across, L.grid.cell * 0.92 + 3);
  const size = pitch * (across > 5 ? 0.9 : 0.86);
  const [column, row] = [seat % across, Math.floor(seat / across)];
  return [L.tray.x + (column - (across - 1) / 2) * pitch, L.tray.y + (row - (down - 1) / 2) * pitch, size];
}
