/**
 * The content of a `Later` is sent once, as pre-rendered HTML: for the hydration script, the
 * element is compiled without it, and Svelte skips it. It is hydrated separately when it is near the screen.
 */
const INSIDE = /(?<=\{@attach whenNear\}>).*(?=<\/div>)/;

/** @returns {import("svelte/compiler").PreprocessorGroup} */
export function contentLater() {
  return {
    name: "content-later",
    markup({ content, filename }) {
      if (!filename?.endsWith("/kit/Later.svelte")) return { code: content };
      if (!INSIDE.test(content)) throw new Error(`${filename} does not hold what is left out`);
      return { code: content.replace(INSIDE, "") };
    },
  };
}
