import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

import { recordings, recordingElements } from "./make/recordings.js";

/** While writing: `npm run dev` draws the page in the browser, with every recording embedded. */
export default defineConfig({
  plugins: [
    svelte(),
    {
      name: "recordings",
      apply: "serve",
      transformIndexHtml: (html) => html.replace("<!--recordings-->", recordingElements(recordings())),
    },
  ],
});
