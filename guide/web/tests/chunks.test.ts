import { expect, test, vi } from "vitest";

import { chunkFiles } from "../make/chunks.js";
import { rounded } from "../make/drawings.js";

const chunk = (fileName: string, code: string, more: object = {}) => ({ fileName, code, imports: [], dynamicImports: [], isEntry: false, isDynamicEntry: false, ...more }) as never;
const CHUNKS = [
  chunk("app.js", 'const e=require("./parts/base.js");e.log.push("app");e.near=()=>Promise.resolve().then(()=>require("./parts/far.js"));', { isEntry: true, imports: ["parts/base.js"], dynamicImports: ["parts/far.js"] }),
  chunk("parts/base.js", "exports.log=globalThis.said;"),
  chunk("parts/far.js", 'const e=require("../app.js"),b=require("./base.js"),s=require("./shared.js");exports.default=s.name;b.log.push("far");', { isDynamicEntry: true, imports: ["parts/base.js", "parts/shared.js"] }),
  chunk("parts/shared.js", 'exports.name="shared"'),
];

test("the page starts with one file, a part loads its shared code, and nothing runs twice", async () => {
  const files = chunkFiles(CHUNKS);
  expect([...files.keys()].sort()).toEqual(["app.js", "parts/far.js", "parts/kit.js"]);
  const said: string[] = [];
  vi.stubGlobal("said", said);
  // as in a single-file page: everything is loaded before it is used
  for (const name of ["parts/kit.js", "parts/far.js"]) (0, eval)(files.get(name) ?? "");
  (0, eval)((files.get("app.js") ?? "").replace('require("app")}', 'globalThis.found=require;require("app")}'));
  expect(said).toEqual(["app"]);
  const { near } = (globalThis as unknown as { found: (name: string) => { near: () => Promise<{ default: string }> } }).found("base");
  expect([(await near()).default, (await near()).default]).toEqual(["shared", "shared"]);
  expect(said).toEqual(["app", "far"]);
  vi.unstubAllGlobals();
});

test("any other form of dynamic import is refused", () => {
  expect(() => chunkFiles([chunk("app.js", "0", { isEntry: true, dynamicImports: ["parts/far.js"] })])).toThrow("0 found");
});

test("coordinates are rounded to a tenth, and digits in text stay", () => {
  const drawing = '<p>1.2345</p><svg viewBox="0 0 9 9" aria-label="0.123"><path d="M1.004 2L3.26 1.5L4 1.5L5 9"></path><rect x="0.123456" height="1e-7" opacity="0.98765"></rect></svg>';
  expect(rounded(drawing)).toBe('<p>1.2345</p><svg viewBox="0 0 9 9" aria-label="0.123"><path d="M1 2l2.3-0.5l0.7 0l1 7.5"></path><rect x="0.1" height="1e-7" opacity="0.99"></rect></svg>');
  const steps = "M0 0" + Array.from({ length: 400 }, (_, at) => `L${(at + 1) / 3} ${Math.sin(at)}`).join("");
  const end = [...rounded(`<svg><path d="${steps}"/></svg>`).matchAll(/l(-?[\d.]+) ?(-?[\d.]+)/g)].reduce((place, [, x]) => place + Number(x), 0);
  expect(end).toBeCloseTo(400 / 3, 1); // rounding errors do not accumulate along a curve
});
