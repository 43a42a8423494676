import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vitest/config";

export default defineConfig({
  plugins: [svelte()],
  // The time limit only ends tests that hang: on a busy machine, tests of all pictures of the scene take 30 s.
  test: { include: ["tests/*.test.ts"], environment: "node", testTimeout: 120_000 },
});
