/**
 * The script in parts: `app.js`, which is loaded first, `parts/NAME.js`, which is loaded when its part is near the
 * screen, and `parts/kit.js`, which several parts share. A chunk is a function in a table, so that it makes no difference
 * whether its file was fetched or is inline: a single-file page cannot import anything.
 */

/** @typedef {import("vite").Rolldown.OutputChunk} Chunk */

const FINDER = `{
const parts=globalThis.anybatchParts,made=new Map;
const require=name=>{if(!made.has(name)){const own={};made.set(name,own);parts.get(name)(own,require,load)}return made.get(name)};
const load=async name=>{await Promise.all(["kit",name].map(one=>parts.has(one)||import(\`./parts/\${one}.js\`)));return require(name)};
require("app")}
`;
const STATIC = /\brequire\((["'`])[^"'`]*?([\w-]+)\.js\1\)/g;
const DYNAMIC = /Promise\.resolve\(\)\.then\(\(\)=>require\((["'`])[^"'`]*?([\w-]+)\.js\1\)\)/g;

/**
 * Turn the chunks of the bundler (CommonJS) into files.
 * @param {Chunk[]} chunks
 * @returns {Map<string, string>}
 */
export function chunkFiles(chunks) {
  const byName = new Map(chunks.map((chunk) => [chunk.fileName, chunk]));
  /** Chunks that the page needs first. */
  const first = /** @type {Set<string>} */ (new Set());
  /** @param {Chunk | undefined} chunk */
  const visit = (chunk) => {
    if (!chunk || first.has(chunk.fileName)) return;
    first.add(chunk.fileName);
    for (const name of chunk.imports) visit(byName.get(name));
  };
  visit(chunks.find((chunk) => chunk.isEntry));
  const files = new Map([["app.js", '"use strict";'], ["parts/kit.js", set("kit", "()=>{}")]]);
  for (const chunk of chunks.toSorted((a, b) => (a.fileName < b.fileName ? -1 : 1))) {
    const file = first.has(chunk.fileName) ? "app.js" : chunk.isDynamicEntry ? chunk.fileName : "parts/kit.js";
    files.set(file, (files.get(file) ?? "") + set(nameOf(chunk.fileName), `(exports,require,load)=>{${text(chunk)}}`));
  }
  return files.set("app.js", files.get("app.js") + FINDER);
}

/**
 * Put a chunk into the table.
 * @param {string} name
 * @param {string} chunk
 */
function set(name, chunk) {
  return `(globalThis.anybatchParts??=new Map).set("${name}",${chunk});\n`;
}

/** @param {Chunk} chunk */
function text({ code, dynamicImports, fileName }) {
  let found = 0;
  const onDemand = code.replace(DYNAMIC, (_whole, _quote, name) => {
    found += 1;
    return `load("${name}")`;
  });
  if (found !== dynamicImports.length) throw new Error(`${fileName}: ${dynamicImports.length} imports on demand, ${found} found in its text`);
  return onDemand.replace(STATIC, (_whole, _quote, name) => `require("${name}")`).trimEnd();
}

/** @param {string} file "parts/planner.js" */
function nameOf(file) {
  return /([\w-]+)\.js$/.exec(file)?.[1] ?? file;
}
