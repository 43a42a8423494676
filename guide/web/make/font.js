/** The subset of STIX Two Math that equations use, a sixth of it. Its licence (OFL) allows subsets under this name. */
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

import subsetFont from "subset-font";

const SIGNS = [
  [0x20, 0x7e], // Latin
  [0x3b1, 0x3c9], // Greek
  [0x1d434, 0x1d467], // italic Latin, used for <mi>x</mi>
  [0x1d6fc, 0x1d714], // italic Greek
];
const OTHERS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻ℓ·×±−√∞∂∇∑≈≠≤≥∈→←…\u2061\u2062\u2063\u00a0\u00af\u02c6\u02dc\u203e";

const FULL = createRequire(import.meta.url).resolve("@fontsource/stix-two-math/files/stix-two-math-latin-400-normal.woff2");

const TEXT = SIGNS.map(([first = 0, last = 0]) => Array.from({ length: last - first + 1 }, (_, at) => String.fromCodePoint(first + at)).join("")).join("") + OTHERS;

export async function mathFont() {
  return subsetFont(readFileSync(FULL), TEXT, { targetFormat: "woff2" });
}

/**
 * The signs of a page's equations that the font lacks.
 * @param {string} page HTML with MathML
 */
export function missingSigns(page) {
  const texts = [...page.matchAll(/<math[^]*?<\/math>/g)].map(([equation]) => equation.replace(/<[^>]*>/g, "").replace(/&[a-z]+;/g, ""));
  return [...new Set(texts.join(""))].filter((sign) => !TEXT.includes(sign) && sign.trim());
}

/** Only the raised digits: the first screen needs them, equations come later. */
export async function raisedFont() {
  return subsetFont(readFileSync(FULL), "⁰¹²³⁴⁵⁶⁷⁸⁹⁻", { targetFormat: "woff2" });
}
