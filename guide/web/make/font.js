/** The subset of STIX Two Math that equations use, a sixth of it. Its licence (OFL) allows subsets under this name. */
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

import subsetFont from "subset-font";

const SIGNS = [
  [0x20, 0x7e], // Latin
  [0x391, 0x3a9], // Greek
  [0x3b1, 0x3c9],
  [0x1d434, 0x1d467], // italic Latin, used for <mi>x</mi>
  [0x1d6e2, 0x1d71b], // italic Greek
];
const OTHERS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻ℎ·×÷±−∓∗∘√∞∂∇∑∏∫≈≠≡≤≥≪≫∈∉⊂⊆∪∩∀∃→←↔⇒⇐⇔↦…⋯⋮⌈⌉⌊⌋⟨⟩‖∣′″ℝℕ𝔼𝒩ℒ𝒪\u2061\u2062\u2063\u00af\u02c6\u02dc\u203e\u23de\u23df";

const FULL = createRequire(import.meta.url).resolve("@fontsource/stix-two-math/files/stix-two-math-latin-400-normal.woff2");

export async function mathFont() {
  const ranges = SIGNS.map(([first = 0, last = 0]) => Array.from({ length: last - first + 1 }, (_, at) => String.fromCodePoint(first + at)).join(""));
  return subsetFont(readFileSync(FULL), ranges.join("") + OTHERS, { targetFormat: "woff2" });
}

/** Only the raised digits: the first screen needs them, equations come later. */
export async function raisedFont() {
  return subsetFont(readFileSync(FULL), "⁰¹²³⁴⁵⁶⁷⁸⁹⁻", { targetFormat: "woff2" });
}
