/**
 * Build the page into a folder: `node make/page.js [FOLDER]`; default: the committed one.
 * Build the script, then a version that pre-renders the page, then assemble the files.
 * The same sources give the same bytes, in any location.
 */
import { mkdtempSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

import { svelte } from "@sveltejs/vite-plugin-svelte";
import { build } from "vite";

import settings from "../svelte.config.js";
import { chunkFiles } from "./chunks.js";
import { quoted, ROOT } from "./code.js";
import { digest, sha256, sources } from "./digest.js";
import { rounded } from "./drawings.js";
import { mathFont, missingSigns, raisedFont } from "./font.js";
import { contentLater } from "./later.js";
import { proseOnce } from "./prose.js";
import { recordings, recordingElements } from "./recordings.js";

const WEB = join(ROOT, "guide/web");
const TOOLS = ["@fontsource/stix-two-math", "katex", "shiki", "subset-font", "svelte", "typescript", "vite"];

const folder = resolve(process.argv[2] ?? join(ROOT, "guide/src/anybatch_guide/dist"));
const work = mkdtempSync(join(tmpdir(), "anybatch-page-"));
try {
  const guide = await builtScript("src/main.ts", [...settings.preprocess, proseOnce(), contentLater()], "cjs");
  // rendered in the browser only, so its script contains all of its text
  const watch = await builtScript("src/watch/main.ts", settings.preprocess, "iife");
  const all = recordings();
  const { render } = await import(pathToFileURL(await builtRenderer()).href);
  const { body, needs } = await render(all);
  /** @type {Map<string, string | Uint8Array>} */
  const files = new Map(chunkFiles(guide.chunks));
  files.set("app.css", guide.style);
  files.set("math.woff2", await mathFont());
  files.set("raised.woff2", await raisedFont());
  const missing = missingSigns([body, ...chunkFiles(guide.chunks).values()].join(""));
  if (missing.length) throw new Error(`add to OTHERS in make/font.js: ${missing.join(" ")}`);
  files.set("index.html", page("index.html", rounded(body), recordingElements(all, needs)));
  files.set("watch/index.html", page("watch.html", "", ""));
  files.set("watch/app.js", watch.chunks[0]?.code ?? "");
  files.set("watch/app.css", watch.style);
  for (const font of ["math.woff2", "raised.woff2"]) files.set(`watch/${font}`, files.get(font) ?? "");
  for (const [name, text] of all) files.set(`rec/${name}.json`, text);
  files.set("BUILD.json", account(files));
  write(files);
} finally {
  rmSync(work, { recursive: true });
}

/**
 * The hydration script of a page, and its style sheet.
 * @param {string} entry
 * @param {import("svelte/compiler").PreprocessorGroup[]} preprocess
 * @param {"cjs" | "iife"} format in parts that are fetched on demand, or as one file
 */
async function builtScript(entry, preprocess, format) {
  const built = await build({
    ...common(preprocess),
    build: {
      write: false,
      target: "es2022",
      cssTarget: ["chrome123", "firefox120", "safari17.5"], // they support light-dark(), so it is kept
      modulePreload: false,
      assetsInlineLimit: 0,
      cssCodeSplit: false,
      rolldownOptions: {
        input: join(WEB, entry),
        onwarn: (warning, otherwise) => {
          if (warning.code !== "EMPTY_IMPORT_META") otherwise(warning); // from Vite's helper, which works without it
        },
        output: { format, entryFileNames: "app.js", chunkFileNames: ({ name }) => `parts/${lowered(name)}.js`, assetFileNames: "app.[ext]" },
      },
    },
  });
  const outputs = [built].flat().flatMap((one) => ("output" in one ? one.output : []));
  const chunks = outputs.filter((one) => one.type === "chunk");
  const style = outputs.find((one) => one.type === "asset" && one.fileName.endsWith(".css"));
  if (style?.type !== "asset" || outputs.length !== chunks.length + 1) {
    throw new Error(`expected scripts and one style sheet, got ${outputs.map((one) => one.fileName).join(", ")}`);
  }
  return { chunks, style: String(style.source) };
}

/** @param {string} name "WhyWrong" becomes "why_wrong" */
function lowered(name) {
  return name.replace(/(?<=[a-z])(?=[A-Z])/g, "_").toLowerCase().replace(/\W/g, "_");
}

/** The page as a program that pre-renders it. */
async function builtRenderer() {
  await build({
    ...common(settings.preprocess),
    ssr: { noExternal: true },
    build: { ssr: join(WEB, "src/prerender.ts"), outDir: work, target: "node20", emptyOutDir: true, rolldownOptions: { output: { entryFileNames: "prerender.mjs", codeSplitting: false } } },
  });
  return join(work, "prerender.mjs");
}

/**
 * @param {import("svelte/compiler").PreprocessorGroup[]} preprocess
 * @returns {import("vite").InlineConfig}
 */
function common(preprocess) {
  return {
    root: WEB,
    configFile: false,
    logLevel: "warn",
    publicDir: false,
    plugins: [
      svelte({
        ...settings,
        configFile: false,
        preprocess,
        onwarn: (warning, otherwise) => {
          if (warning.code !== "a11y_missing_content") otherwise?.(warning); // prose that is sent once looks empty to it
        },
      }),
    ],
  };
}

/**
 * @param {string} source
 * @param {string} body
 * @param {string} data
 */
function page(source, body, data) {
  return readFileSync(join(WEB, source), "utf8")
    .replace(/<!--note:.*?-->\n/s, "")
    .replace(/<script type="module".*<\/script>/, "")
    .replace("<!--assets-->", '<link rel="stylesheet" href="app.css">\n<script defer src="app.js"></script>')
    .replace("<!--page-->", () => body)
    .replace("<!--recordings-->", () => data)
    .replace(/\n{2,}/g, "\n");
}

/**
 * The sources of the files, and the digests of the files.
 * @param {Map<string, string | Uint8Array>} files
 */
function account(files) {
  const lock = JSON.parse(readFileSync(join(WEB, "package-lock.json"), "utf8"));
  const paths = sources(quoted);
  const text = {
    sources: digest(paths),
    quoted: [...quoted].sort(),
    tools: Object.fromEntries(TOOLS.map((name) => [name, lock.packages[`node_modules/${name}`].version])),
    files: Object.fromEntries([...files].sort(([a], [b]) => (a < b ? -1 : 1)).map(([name, bytes]) => [name, sha256(bytes)])),
  };
  return `${JSON.stringify(text, undefined, 2)}\n`;
}

/**
 * Write into an empty folder, so that no file of an earlier build remains.
 * @param {Map<string, string | Uint8Array>} files
 */
function write(files) {
  rmSync(folder, { recursive: true, force: true });
  for (const part of ["parts", "rec", "watch"]) mkdirSync(join(folder, part), { recursive: true });
  for (const [name, bytes] of files) writeFileSync(join(folder, name), bytes);
}
