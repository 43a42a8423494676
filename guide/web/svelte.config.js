import { vitePreprocess } from "@sveltejs/vite-plugin-svelte";

import { code } from "./make/code.js";
import { equations } from "./make/equations.js";

/** Short class name to component styles. @type {Map<string, string>} */
const named = new Map();

/**
 * The same names wherever the project lies on a disk. They stand at most elements of the page, so they are short.
 * @param {{ hash: (text: string) => string, css: string }} component
 */
function cssHash({ hash, css }) {
  const name = `s${hash(css).slice(0, 4)}`;
  if ((named.get(name) ?? css) !== css) throw new Error(`two components' styles have the name ${name}: make names longer in svelte.config.js`);
  named.set(name, css);
  return name;
}

export default {
  preprocess: [vitePreprocess({ script: false, style: false }), equations(), code()],
  compilerOptions: { cssHash },
};
