/**
 * `<Tex t={String.raw`...`} />` becomes MathML at build time: the page contains no KaTeX code.
 * Products such as "16 × 4" and an equation with its comma stay on one line.
 * Browsers lay out MathML, screen readers read it, and it needs no inline styles, which the page's policy forbids.
 */
import katex from "katex";

const USE = /<Tex\s+(?<before>[^>{]*?)t=\{String\.raw`(?<tex>[^`]*)`\}\s*(?<after>[^>{]*?)\/>(?<mark>[,.;:]?)/g;
/** "16 × 4", also with expressions or elements on either side. */
const PRODUCT = /(?<=[\d}>]) × (?=[\d$<{])/g;
const IMPORT = /^\s*import Tex from .*;\n/m;

/** @returns {import("svelte/compiler").PreprocessorGroup} */
export function equations() {
  return {
    name: "equations",
    markup({ content, filename }) {
      const written = content.match(/<Tex\b/g)?.length ?? 0;
      let found = 0;
      const code = content.replace(USE, (_whole, before, tex, after, mark) => {
        found += 1;
        const math = mathml(tex, /\bblock\b/.test(`${before} ${after}`));
        return mark ? `<span class="together">${math}${mark}</span>` : math; // no line begins with a comma
      }).replace(PRODUCT, "\u00a0×\u00a0");
      if (written !== found) {
        throw new Error(`${filename}: ${written - found} <Tex> not understood; write <Tex t={String.raw\`...\`} />, with \`block\` if displayed.`);
      }
      return { code: found ? code.replace(IMPORT, "") : code };
    },
  };
}

/**
 * One equation as MathML for a Svelte template.
 * @param {string} tex
 * @param {boolean} block
 */
export function mathml(tex, block) {
  const html = katex.renderToString(tex, { output: "mathml", displayMode: block, throwOnError: true, strict: "error" });
  const inner = /<semantics>(?<inner>.*)<annotation[^>]*>.*<\/annotation><\/semantics>/s.exec(html)?.groups?.["inner"];
  if (inner === undefined) throw new Error(`KaTeX gave no MathML for ${tex}`);
  if (/ style=/.test(inner)) throw new Error(`the equation ${tex} needs an inline style, which the page's policy forbids`);
  const math = `<math${block ? ' display="block"' : ""}>${inner}</math>`.replaceAll("{", "&#123;").replaceAll("}", "&#125;");
  return block ? `<div class="equation">${math}</div>` : math;
}
