/** Validation of a typed number. */
import { formatNumber } from "./format";

export interface Allowed {
  least: number;
  most: number;
  /** The allowed values, if there are only some. */
  stops?: readonly number[];
  whole?: boolean;
}

/** Index of the nearest stop. */
export function nearestStop(stops: readonly number[], wanted: number): number {
  return stops.reduce((best, stop, at) => (Math.abs(stop - wanted) < Math.abs((stops[best] ?? stop) - wanted) ? at : best), 0);
}

/** Return the allowed value (null if the input is not a number), and a message if it differs from the input. */
export function allowed(wanted: number, { least, most, stops, whole = false }: Allowed): { value: number | null; word: string } {
  if (!Number.isFinite(wanted)) return { value: null, word: "This is not a number." };
  const asked = formatNumber(wanted);
  if (wanted > most) return { value: most, word: `${asked} is too large: the maximum is ${formatNumber(most)}.` };
  if (wanted < least) return { value: least, word: `${asked} is too small: the minimum is ${formatNumber(least)}.` };
  const value = stops ? (stops[nearestStop(stops, wanted)] ?? wanted) : whole ? Math.round(wanted) : wanted;
  if (value === wanted) return { value, word: "" };
  return { value, word: stops ? `${asked} is not available; the nearest value is ${formatNumber(value)}.` : `This must be a whole number: ${formatNumber(value)}.` };
}
