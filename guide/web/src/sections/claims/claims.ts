/** What a claim's recording holds: see guide/src/anybatch_guide/claims/claim.py. */
export type Verdict = "true" | "only_if" | "false";

export interface ClaimNumber {
  label: string;
  unit: string;
  /** A word where JSON has no number: "Infinity". */
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

/** A text in pieces: words, names of numbers, and what stands between back-ticks. */
export function pieces(text: string): Piece[] {
  return text
    .split(/(\{\w+\}|`[^`]*`)/)
    .filter((piece) => piece !== "")
    .map((piece) => (piece.startsWith("{") ? { name: piece.slice(1, -1) } : piece.startsWith("`") ? { code: piece.slice(1, -1) } : { words: piece }));
}

/** 16 × 4 as the page writes it; a recording has it in letters that every terminal has. */
export function cuts(text: string): string {
  return text.replace(/(\d) x (?=\d)/g, "$1\u00a0×\u00a0");
}

/** How a number is shown: with a unit of `Value`, and few digits unless it is counted. */
export function shape(number: ClaimNumber): { value: number; unit?: string; digits?: number } {
  const value = Number(number.value);
  if (number.unit === "bytes") return { value, unit: "bytes" };
  if (number.unit === "%") return { value, unit: "%", digits: 3 };
  if (number.unit === "x") return { value, unit: "times", digits: 2 };
  if (number.unit !== "") return { value };
  return Number.isInteger(value) ? { value } : { value, digits: Math.abs(value) < 0.01 ? 2 : 3 };
}
