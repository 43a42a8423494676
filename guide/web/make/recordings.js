/** The recordings in guide/web/recordings, the source of the page's numbers. */
import { readdirSync, readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

const FOLDER = fileURLToPath(new URL("../recordings/", import.meta.url));

/** @typedef {{ name: string, question: string, made: object, data: object }} Recording */

/** @returns {Map<string, string>} name to the file's text */
export function recordings() {
  const names = readdirSync(FOLDER).filter((name) => name.endsWith(".json")).sort();
  return new Map(names.map((name) => [name.slice(0, -".json".length), readFileSync(FOLDER + name, "utf8")]));
}

/**
 * Metadata of every recording, including those fetched on demand.
 * @param {Map<string, string>} all
 */
export function about(all) {
  return Object.fromEntries([...all].map(([name, text]) => {
    const { question, made } = /** @type {Recording} */ (JSON.parse(text));
    return [name, { question, made }];
  }));
}

/**
 * Elements with the embedded recordings, and the recordings that each part fetches.
 * @param {Map<string, string>} all
 * @param {Record<string, string[]>} needs by part; those of "" are embedded
 */
export function recordingElements(all, { "": embedded = [...all.keys()], ...needs } = {}) {
  const elements = [element("rec-index", JSON.stringify(about(all))), element("rec-needs", JSON.stringify(needs))];
  for (const name of embedded) elements.push(element(`rec-${name}`, (all.get(name) ?? "").trim()));
  return elements.join("\n");
}

/**
 * @param {string} id
 * @param {string} json
 */
function element(id, json) {
  return `<script type="application/json" id="${id}">${json.replaceAll("<", "\\u003c")}</script>`;
}
