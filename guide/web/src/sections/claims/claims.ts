/** Data of a claim's recording: see guide/src/anybatch_guide/claims/claim.py. */
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
}

export const VERDICTS: Record<Verdict, { name: string; mark: string }> = {
  true: { name: "true", mark: "✓" },
  only_if: { name: "true only if", mark: "≈" },
  false: { name: "false", mark: "✕" },
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

/** Headlines of claims whose text does not begin with the result, by name and verdict. */
const HEADLINES: Record<string, string> = {
  "divide_by_n only_if": "Dividing by N is off by {uneven_error} when micro-batches have 24, 24 and 16 samples.",
  "forgetting only_if": "Without the division, SGD ends at a loss of {sgd_no_division} instead of {sgd_right}; with Adam the factor cancels.",
  "sync_batch_norm only_if": "On one rank the gradient is still off by {sync_error}: SyncBatchNorm combines ranks, not micro-batches.",
  "larger_is_faster only_if": "Going from 1 to 4 samples trains {gain_1_to_4} as fast; going from 64 to 256, {gain_64_to_256} as fast.",
};

/** Split the text of a claim into a headline, a sentence with its result, and the rest. */
export function headline(data: ClaimData): { head: string; rest: string } {
  const chosen = HEADLINES[`${data.claim} ${data.verdict}`];
  if (chosen !== undefined) return { head: chosen, rest: data.text };
  const [head = "", ...rest] = data.text.split(/(?<=[.?!])\s+(?=[A-Z{`])/);
  return { head, rest: rest.join(" ") };
}

/** Format of a number: a unit of `Value`, and few digits unless it is a count. */
export function shape(number: ClaimNumber): { value: number; unit?: string; digits?: number } {
  const value = Number(number.value);
  if (number.unit === "bytes") return { value, unit: "bytes" };
  if (number.unit === "%") return { value, unit: "%", digits: 3 };
  if (number.unit === "x") return { value, unit: "times", digits: 2 };
  if (number.unit !== "") return { value };
  return Number.isInteger(value) ? { value } : { value, digits: Math.abs(value) < 0.01 ? 2 : 3 };
}
