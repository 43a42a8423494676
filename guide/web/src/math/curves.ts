/** Curves as paths, and the values under a cursor. */
import type { Scale } from "./scales";

export interface Curve {
  x: readonly number[];
  y: readonly number[];
}

/** Values beyond a chart are drawn at most this far away: accessibility checkers lay a grid over the whole drawing. */
const FARTHEST = 1e4;

/** An SVG path through the points; where a number is missing or cannot be drawn, the line breaks. */
export function path(curve: Curve, across: Scale, down: Scale): string {
  let broken = true;
  const parts: string[] = [];
  curve.x.forEach((place, at) => {
    const value = curve.y[at];
    const drawable = value !== undefined && Number.isFinite(value) && !(down.log && value <= 0) && !(across.log && place <= 0);
    if (drawable) parts.push(`${broken ? "M" : "L"}${tenth(across(place))} ${tenth(Math.max(-FARTHEST, Math.min(FARTHEST, down(value))))}`);
    broken = !drawable;
  });
  return parts.join("");
}

/** All x positions with a point of some curve, in order. */
export function positions(curves: readonly Curve[]): number[] {
  return [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
}

/** The value of a curve at x, if it has a point there. */
export function nearestAt(curve: Curve, place: number): number | undefined {
  const value = curve.y[curve.x.indexOf(place)];
  return value !== undefined && Number.isFinite(value) ? value : undefined;
}

/** The value of a curve at its point nearest to x; its points are sorted. */
export function closestTo(curve: Curve, place: number): number | undefined {
  let [from, to] = [0, curve.x.length];
  while (from < to) {
    const middle = (from + to) >> 1;
    if ((curve.x[middle] ?? place) < place) from = middle + 1;
    else to = middle;
  }
  const apart = (at: number) => Math.abs((curve.x[at] ?? Infinity) - place);
  const outside = place > (curve.x.at(-1) ?? -Infinity) || place < (curve.x[0] ?? Infinity);
  const value = outside ? undefined : curve.y[from > 0 && apart(from - 1) <= apart(from) ? from - 1 : from];
  return value !== undefined && Number.isFinite(value) ? value : undefined;
}

/** The range `factor` times as wide, in which a place stays where it is; null if it is not smaller than the full one. */
export function zoomed([from, to]: readonly [number, number], [first, last]: readonly [number, number], place: number, factor: number): [number, number] | null {
  const width = (to - from) * factor;
  if (width >= last - first) return null;
  const begin = Math.min(last - width, Math.max(first, place - (place - from) * factor));
  return [begin, begin + width];
}

/** For each stretch of a curve above the limits of its axis, the highest point; infinite values do not count. */
export function peaksAbove(curve: Curve, most: number): { x: number; y: number }[] {
  const peaks: { x: number; y: number }[] = [];
  let inside = true;
  curve.x.forEach((x, at) => {
    const y = curve.y[at] ?? Number.NaN;
    const last = peaks.at(-1);
    if (!(y > most) || !Number.isFinite(y)) inside = true;
    else {
      if (inside || !last) peaks.push({ x, y });
      else if (y > last.y) Object.assign(last, { x, y });
      inside = false;
    }
  });
  return peaks;
}

/** Add some margin above and below, and include zero if it is near. */
export function spread([least, most]: readonly [number, number], log: boolean): [number, number] {
  if (log) {
    const air = Math.max(1.15, (most / least) ** 0.05);
    return [least / air, most * air];
  }
  const air = (most - least) * 0.06;
  return [least >= 0 && least < (most - least) * 0.5 ? 0 : least - air, most + air];
}

/** Coordinates in drawings have one decimal place. */
export function tenth(value: number): number {
  return Math.round(value * 10) / 10;
}
