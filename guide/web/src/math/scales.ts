/** Scales and ticks for drawings. */

export interface Scale {
  /** The position of a number. */
  (value: number): number;
  readonly log: boolean;
  readonly domain: readonly [number, number];
}

/** A linear or logarithmic scale. */
export function scale(domain: readonly [number, number], range: readonly [number, number], log = false): Scale {
  const transform = log ? Math.log : (value: number) => value;
  const [first, last] = [transform(domain[0]), transform(domain[1])];
  const slope = last === first ? 0 : (range[1] - range[0]) / (last - first);
  const place = (value: number) => range[0] + (transform(value) - first) * slope;
  return Object.assign(place, { log, domain });
}

/** Smallest and largest of the finite numbers; for a logarithmic axis, of the positive ones. */
export function extent(values: Iterable<number>, log = false): [number, number] {
  let [smallest, largest] = [Infinity, -Infinity];
  for (const value of values) {
    if (!Number.isFinite(value) || (log && value <= 0)) continue;
    smallest = Math.min(smallest, value);
    largest = Math.max(largest, value);
  }
  if (smallest > largest) return log ? [1, 10] : [0, 1];
  if (smallest === largest) return log ? [smallest / 2, largest * 2] : [smallest - Math.abs(smallest || 1) / 2, largest + Math.abs(largest || 1) / 2];
  return [smallest, largest];
}

/** About `count` round numbers within a domain, at least two: 1, 2 or 5 times a power of ten apart. */
export function ticks([smallest, largest]: readonly [number, number], count: number): number[] {
  const rough = (largest - smallest) / Math.max(1, count);
  if (!(rough > 0) || !Number.isFinite(rough)) return [smallest];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((factor) => factor * power >= rough * 0.999) ?? 10);
  const first = Math.ceil(smallest / step - 1e-9);
  const last = Math.floor(largest / step + 1e-9);
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  if (last <= first && count < 8) return ticks([smallest, largest], 2 * count);  // one tick shows no distance
  return [...new Set(Array.from({ length: last - first + 1 }, (_, at) => Number(((first + at) * step).toFixed(Math.min(100, digits)))))];
}

/** Powers of ten within a domain, at most `count`; with fewer than two, also their multiples by 2 and 5. */
export function logTicks([smallest, largest]: readonly [number, number], count: number): number[] {
  const [first, last] = [Math.floor(Math.log10(smallest)), Math.ceil(Math.log10(largest))];
  const inside = (value: number) => value >= smallest * 0.9999 && value <= largest * 1.0001;
  const powers = Array.from({ length: last - first + 1 }, (_, at) => Number(`1e${first + at}`));
  const tens = powers.filter(inside);
  if (tens.length >= 3) {
    const every = Math.ceil(tens.length / Math.max(1, count));
    return tens.filter((_, at) => at % every === 0);
  }
  const finer = powers.flatMap((power) => [1, 2, 5].map((factor) => Number((factor * power).toPrecision(1)))).filter(inside);
  return finer.length >= 2 ? finer : ticks([smallest, largest], count);
}

const WIDEST = 7.5; // a letter of small text, on average, in the widest of the usual fonts
const GAP = 6;

/** The marks whose labels do not overlap: each is at least `room` to the right of the previous one. */
export function withoutOverlap(marks: readonly number[], place: Scale, room: number): number[] {
  const kept: number[] = [];
  for (const mark of marks) {
    const before = kept.at(-1);
    if (before === undefined || place(mark) - place(before) >= room) kept.push(mark);
  }
  return kept;
}

/**
 * Labels of vertical lines with their left edges: right of the line, the last one at the edge if it has no room there.
 * A label that would overlap an earlier one, or the last, is left out.
 */
export function lineLabels(lines: readonly { at: number; label: string }[], place: (at: number) => number, width: number): { label: string; left: number; right: number }[] {
  const all = lines.map(({ at, label }) => {
    const room = label.length * WIDEST;
    const left = Math.max(0, Math.min(place(at) + GAP, width - room));
    return { label, left, right: left + room };
  });
  const last = all.at(-1);
  let end = -Infinity;
  return all.filter((one) => {
    if (one.left < end || (one !== last && last && one.right > last.left)) return false;
    end = one.right;
    return true;
  });
}

/** Position of the label of a vertical line: right of it, or left of it, or at the edge if neither has room; `end`: right-aligned. */
export function labelPosition(place: number, words: string, width: number): { x: number; end: boolean } {
  const room = words.length * WIDEST + GAP;
  if (place + room <= width) return { x: place + GAP, end: false };
  return { x: place - room >= 0 ? place - GAP : width, end: true };
}
