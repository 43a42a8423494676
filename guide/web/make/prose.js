/**
 * Prose travels once. The page is rendered beforehand, and a script that brings it to life never touches a paragraph
 * without expressions: Svelte walks past it. So for the script, such elements are compiled without their children.
 * Where an element might be made anew (in a block, or in a component that may not show what it is given) it stays whole.
 */
import { parse } from "svelte/compiler";

/** Components that show their children always, from the very beginning. */
const TRANSPARENT = new Set(["Figure", "Code", "Aside", "Predict"]);

/** @returns {import("svelte/compiler").PreprocessorGroup} */
export function proseOnce() {
  return {
    name: "prose-once",
    markup({ content, filename }) {
      if (!filename || !/\/sections\//.test(filename)) return { code: content };
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
