/**
 * `<Code file="examples/a.py" lines="3-20" mark="7-8" />` or `<Code lang="python" text={`...`} />` gets its lines
 * at build time, as spans with classes: the page contains no Shiki code and no inline styles.
 */
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

import { createHighlighter, createCssVariablesTheme } from "shiki";

export const ROOT = fileURLToPath(new URL("../../..", import.meta.url));

const USE = /<Code\s+(?<attributes>(?:[a-z]+(?:="[^"]*"|=\{`[^`]*`\}|=\{[^`{}]*\})?\s*)*)\/>/g;
const ATTRIBUTE = /(?<name>[a-z]+)(?:="(?<plain>[^"]*)"|=\{`(?<text>[^`]*)`\}|=\{(?<dynamic>[^`{}]*)\})?/g;
const LANGUAGES = { py: "python", sh: "bash", toml: "toml", json: "json" };

/** Files of the project that the page quotes; they are inputs of the build. @type {Set<string>} */
export const quoted = new Set();

const highlighter = await createHighlighter({
  langs: ["python", "bash", "toml", "json"],
  themes: [createCssVariablesTheme({ name: "classes", variablePrefix: "--t-" })],
});

/** @returns {import("svelte/compiler").PreprocessorGroup} */
export function code() {
  return {
    name: "code",
    markup({ content, filename }) {
      const written = content.match(/<Code\b/g)?.length ?? 0;
      let found = 0;
      const dependencies = /** @type {string[]} */ ([]);
      const result = content.replace(USE, (...args) => {
        found += 1;
        return filled(args.at(-1)["attributes"], dependencies);
      });
      if (written !== found) {
        throw new Error(`${filename}: ${written - found} <Code> not understood; see guide/web/README.md for the two ways to write it.`);
      }
      return { code: result, dependencies };
    },
  };
}

/**
 * One use of `Code` with its lines in it.
 * @param {string} attributes
 * @param {string[]} dependencies
 */
function filled(attributes, dependencies) {
  /** @type {Record<string, string>} */
  const own = {};
  const others = [];
  for (const found of attributes.matchAll(ATTRIBUTE)) {
    const { name, plain, text, dynamic } = /** @type {Record<string, string>} */ (found.groups);
    if (["file", "lang", "lines", "mark", "text"].includes(name ?? "") && dynamic === undefined) own[name ?? ""] = plain ?? text ?? "";
    else others.push(found[0]);
  }
  if (own["file"]) {
    quoted.add(own["file"]);
    dependencies.push(ROOT + own["file"]);
  }
  const source = own["file"] ? readFileSync(ROOT + own["file"], "utf8") : (own["text"] ?? "");
  const language = own["lang"] ?? LANGUAGES[/** @type {"py"} */ (own["file"]?.split(".").at(-1))] ?? "python";
  const all = source.replace(/^\n/, "").trimEnd().split("\n");
  const [first, last] = range(own["lines"], all.length);
  const shown = outdented(all.slice(first - 1, last));
  const lines = spans(shown.join("\n"), language, first, marks(own["mark"]));
  const from = own["file"] ? ` file="${own["file"]}"` : "";
  return `<Code ${others.join(" ")}${from} lang="${language}" first={${first}}><pre><code>${lines}</code></pre></Code>`;
}

/**
 * @param {string} source
 * @param {string} lang
 * @param {number} first
 * @param {Set<number>} marked
 */
export function spans(source, lang, first, marked) {
  const { tokens } = highlighter.codeToTokens(source, { lang: /** @type {"python"} */ (lang), theme: "classes" });
  return tokens
    .map((line, at) => {
      const number = first + at;
      const inner = line.map((token) => {
        const kind = /--t-(?:token-)?([a-z-]+)/.exec(token.color ?? "")?.[1] ?? "foreground";
        const text = escaped(token.content);
        return kind === "foreground" || !token.content.trim() ? text : `<span class="t-${kind}">${text}</span>`;
      });
      return `<span class="line${marked.has(number) ? " marked" : ""}" data-line="${number}">${inner.join("")}\n</span>`;
    })
    .join("");
}

/** @param {string} text */
function escaped(text) {
  const entities = { "&": "&amp;", "<": "&lt;", ">": "&gt;", "{": "&#123;", "}": "&#125;" };
  return text.replace(/[&<>{}]/g, (character) => entities[/** @type {"&"} */ (character)]);
}

/**
 * "3-20" as numbers, or all.
 * @param {string | undefined} text
 * @param {number} length
 * @returns {[number, number]}
 */
function range(text, length) {
  if (!text) return [1, length];
  const [first = 1, last = first] = text.split("-").map(Number);
  if (!(first >= 1 && last >= first && last <= length)) throw new Error(`lines ${text} of a file of ${length} lines`);
  return [first, last];
}

/** @param {string | undefined} text */
function marks(text) {
  const marked = /** @type {Set<number>} */ (new Set());
  for (const part of text ? text.split(",") : []) {
    const [first = 0, last = first] = part.split("-").map(Number);
    for (let line = first; line <= last; line += 1) marked.add(line);
  }
  return marked;
}

/** @param {string[]} lines */
function outdented(lines) {
  const depths = lines.filter((line) => line.trim()).map((line) => line.length - line.trimStart().length);
  const depth = Math.min(...depths);
  return lines.map((line) => line.slice(depth));
}
