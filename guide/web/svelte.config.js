import { vitePreprocess } from "@sveltejs/vite-plugin-svelte";

import { code } from "./make/code.js";
import { equations } from "./make/equations.js";

export default {
  preprocess: [vitePreprocess({ script: false, style: false }), equations(), code()],
  // the same names wherever the project lies on a disk
  compilerOptions: { cssHash: (/** @type {{ hash: (text: string) => string, css: string }} */ { hash, css }) => `s${hash(css)}` },
};
