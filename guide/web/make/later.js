/**
 * What is in a `Later` travels once, as what was rendered beforehand: for the script that brings the page to life, the
 * element is compiled without it, and Svelte walks past. When it is near the screen, it is brought to life by itself.
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
