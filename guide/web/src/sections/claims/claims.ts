/** Data of a claim's recording: see guide/src/anybatch_guide/claims/claim.py. */
import type { ExperimentView } from "../../data/guide.svelte";
import type { From } from "../../data/types";

export type Verdict = "true" | "only_if" | "false";

export interface ClaimNumber {
  label: string;
  unit: string;
  /** A string for values without a JSON number: "Infinity". */
  value: number | string;
}

export interface ClaimData {
  claim: string;
  side: "advantage" | "limitation" | "recipe" | "batch_size" | "devices";
  title: string;
  said: string;
  how: string;
  rule: string;
  verdict: Verdict;
  text: string;
  numbers: Record<string, ClaimNumber>;
  /** Whether a model forecast the numbers. */
  forecast?: boolean;
}

/** The source of a claim's numbers. */
export function sourceOf({ from, data, name }: ExperimentView<ClaimData>): From {
  if (!data.forecast) return from;
  return { kind: "forecast", name, ...(from.kind === "live" && from.made ? { made: from.made } : {}) };
}

export const VERDICTS: Record<Verdict, { name: string; mark: string }> = {
  true: { name: "True", mark: "✓" },
  only_if: { name: "True with a condition", mark: "≈" },
  false: { name: "False", mark: "✕" },
};

export interface Piece {
  words?: string;
  name?: string;
  code?: string;
}

/** Split a text into words, names of numbers and code in back-ticks. */
export function pieces(text: string): Piece[] {
  return text
    .split(/(\{\w+\}|`[^`]*`)/)
    .filter((piece) => piece !== "")
    .map((piece) => (piece.startsWith("{") ? { name: piece.slice(1, -1) } : piece.startsWith("`") ? { code: piece.slice(1, -1) } : { words: piece }));
}

/** Replace "16 x 4", the ASCII form in recordings, by "16 × 4". */
export function cuts(text: string): string {
  return text.replace(/(\d) x (?=\d)/g, "$1\u00a0×\u00a0");
}

/** Split the text of a claim into its first sentence, which has the result, and the rest. */
export function headline(data: Pick<ClaimData, "text">): { head: string; rest: string } {
  const [head = "", ...rest] = data.text.split(/(?<=[.?!])\s+(?=[A-Z{`])/);
  return { head, rest: rest.join(" ") };
}

/** Relative errors from here on are shown as percentages; smaller ones are rounding. */
const ROUNDING = 1e-3;

/** Format of a number: a unit of `Value`, and few digits unless it is a count. */
export function shape(number: ClaimNumber): { value: number; unit?: string; digits?: number } {
  const value = Number(number.value);
  if (number.unit === "bytes") return { value, unit: "bytes" };
  if (number.unit === "error") return value < ROUNDING ? { value, digits: 2 } : { value: 100 * value, unit: "%", digits: 2 };
  if (number.unit === "%") return { value, unit: "%", digits: 3 };
  if (number.unit === "x") return { value, unit: "times", digits: 2 };
  if (number.unit !== "") return { value };
  return Number.isInteger(value) ? { value } : { value, digits: Math.abs(value) < 0.01 ? 2 : 3 };
}
