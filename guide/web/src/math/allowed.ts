/** A number that was asked for, and the one that can be had. */
import { formatNumber } from "./format";

export interface Allowed {
  least: number;
  most: number;
  /** The only numbers there are. */
  stops?: readonly number[];
  whole?: boolean;
}

/** The place of the stop that is nearest. */
export function nearestStop(stops: readonly number[], wanted: number): number {
  return stops.reduce((best, stop, at) => (Math.abs(stop - wanted) < Math.abs((stops[best] ?? stop) - wanted) ? at : best), 0);
}

/** The number that is taken, null where none was asked for, and why it is another one; an empty word if it is not. */
export function allowed(wanted: number, { least, most, stops, whole = false }: Allowed): { value: number | null; word: string } {
  if (!Number.isFinite(wanted)) return { value: null, word: "That is no number." };
  const asked = formatNumber(wanted);
  if (wanted > most) return { value: most, word: `${asked} is too much: ${formatNumber(most)} is the most there is here.` };
  if (wanted < least) return { value: least, word: `${asked} is too little: ${formatNumber(least)} is the least there is here.` };
  const value = stops ? (stops[nearestStop(stops, wanted)] ?? wanted) : whole ? Math.round(wanted) : wanted;
  if (value === wanted) return { value, word: "" };
  return { value, word: stops ? `There is no ${asked} here; the nearest is ${formatNumber(value)}.` : `A whole number is wanted: ${formatNumber(value)}.` };
}
