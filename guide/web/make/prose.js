/**
 * Prose is sent once. The page is pre-rendered, and the hydration script never changes a paragraph
 * without expressions: Svelte skips it. So for the script, such elements are compiled without their children.
 * Elements that may be re-created (in a block, or in a component that may not render its children) stay complete.
 */
import { parse } from "svelte/compiler";

/** Components that always render their children. */
const TRANSPARENT = new Set(["Figure", "Code", "Aside", "Predict"]);

/** @returns {import("svelte/compiler").PreprocessorGroup} */
export function proseOnce() {
  return {
    name: "prose-once",
    markup({ content, filename }) {
      if (!filename || !/\/sections\/|\/(Scene|App)\.svelte$/.test(filename)) return { code: content };
      /** @type {[number, number][]} */
      const cuts = [];
      for (const node of parse(content, { modern: true }).fragment.nodes) visit(node, cuts);
      let code = content;
      for (const [start, end] of cuts.toReversed()) code = code.slice(0, start) + code.slice(end);
      return { code };
    },
  };
}

/**
 * @param {any} node
 * @param {[number, number][]} cuts
 */
function visit(node, cuts) {
  const children = node.fragment?.nodes ?? [];
  if (node.type === "RegularElement") {
    if (children.length && children.every(isStatic)) cuts.push([children[0].start, children.at(-1).end]);
    else for (const child of children) visit(child, cuts);
  } else if (node.type === "Component" && TRANSPARENT.has(node.name)) {
    for (const child of children) visit(child, cuts);
  }
}

/**
 * @param {any} node
 * @returns {boolean}
 */
function isStatic(node) {
  if (node.type === "Text" || node.type === "Comment") return true;
  return (
    node.type === "RegularElement" &&
    node.attributes.every((/** @type {any} */ attribute) => attribute.type === "Attribute" && isPlain(attribute.value)) &&
    node.fragment.nodes.every(isStatic)
  );
}

/** @param {any} value */
function isPlain(value) {
  return value === true || (Array.isArray(value) && value.every((part) => part.type === "Text"));
}
