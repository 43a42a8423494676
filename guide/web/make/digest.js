/** Digest of the page's sources, which can be recomputed without Node (guide/tests/test_dist.py). */
import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";

import { ROOT } from "./code.js";

/** Files of guide/web/ that are not part of the page. */
const APART = /^guide\/web\/(node_modules|tests|\.[^/]*)\/|\.md$|^guide\/web\/vitest\.config\.js$/;

/**
 * Paths of all sources, relative to the project root, sorted.
 * @param {Iterable<string>} quoted files outside guide/web/ that the page quotes
 */
export function sources(quoted) {
  const own = readdirSync(`${ROOT}guide/web`, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => `${entry.parentPath}/${entry.name}`.replaceAll("\\", "/").slice(ROOT.length))
    .filter((path) => !APART.test(path));
  return [...own, ...quoted].sort();
}

/** @param {string[]} paths */
export function digest(paths) {
  const whole = createHash("sha256");
  for (const path of paths) whole.update(`${sha256(readFileSync(ROOT + path))}  ${path}\n`);
  return whole.digest("hex");
}

/** @param {string | Uint8Array} bytes */
export function sha256(bytes) {
  return createHash("sha256").update(bytes).digest("hex");
}
