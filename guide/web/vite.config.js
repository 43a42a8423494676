import { fileURLToPath } from "node:url";

import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

import { recordings, recordingElements } from "./make/recordings.js";

/** Development: `npm run dev` renders the page in the browser, with every recording embedded. */
export default defineConfig({
  plugins: [
    svelte({ configFile: fileURLToPath(new URL("svelte.config.js", import.meta.url)) }),
    {
      name: "recordings",
      apply: "serve",
      transformIndexHtml: (html) => html.replace("<!--recordings-->", recordingElements(recordings())),
    },
  ],
});
