import { readFileSync } from "node:fs";

import { expect, test } from "vitest";

import { equations } from "../make/equations.js";
import { provideRecordings } from "../src/data/recordings";
import { explain, withoutDuplicates } from "../src/data/provenance";
import { lineLabels } from "../src/math/scales";
import { headline, shape, sourceOf } from "../src/sections/claims/claims";

test("a forecast says that it was not measured, and keeps its command", () => {
  const made = { date: "2026-11-24", device: "cpu", versions: {}, commit: null, command: "anybatch guide record claims_buckets" };
  provideRecordings(new Map([["claims_buckets", JSON.stringify({ name: "claims_buckets", question: "?", made, data: {} })]]));
  const claim = { name: "claims_buckets", from: { kind: "recorded", name: "claims_buckets" }, data: { forecast: true } } as never;
  expect(sourceOf(claim)).toEqual({ kind: "forecast", name: "claims_buckets" });
  expect(explain(sourceOf(claim))).toMatch(/^Forecast .*, not measured\. .*anybatch guide record claims_buckets$/);
  expect(sourceOf({ ...(claim as object), data: {} } as never).kind).toBe("recorded");
  expect(withoutDuplicates([sourceOf(claim), sourceOf(claim), { kind: "chosen" }])).toHaveLength(2);
});

test("the headline of a claim is the sentence with its result", () => {
  expect(headline({ text: "It is off by {error}. For `bf16` it is not. {other} are right." })).toEqual({ head: "It is off by {error}.", rest: "For `bf16` it is not. {other} are right." });
  const results = { divide_by_n: "uneven_error", forgetting: "sgd_no_division", sync_batch_norm: "sync_error", larger_is_faster: "gain_1_to_4", less_noise: "loss_same_steps", ddp_memory: "ddp_bytes" };
  for (const [name, number] of Object.entries(results)) {
    const { data } = JSON.parse(readFileSync(new URL(`../recordings/claims_${name}.json`, import.meta.url), "utf-8"));
    expect(headline(data).head).toContain(`{${number}}`);
  }
});

test("relative errors are percentages, unless they are rounding", () => {
  expect(shape({ label: "", unit: "error", value: 0.10072 })).toMatchObject({ unit: "%", digits: 2 });
  expect(shape({ label: "", unit: "error", value: 1.3e-7 })).toEqual({ value: 1.3e-7, digits: 2 });
});

test("on a phone every hill keeps its label, and the update stands after the last one", () => {
  const { data } = JSON.parse(readFileSync(new URL("../recordings/memory_accumulation.json", import.meta.url), "utf-8"));
  const { num_moments, marks } = data.ways[0].courses["16"] as { num_moments: number; marks: [number, string][] };
  const lines = marks.map(([at, name]) => ({ at, label: name.replace("micro-batch ", "") }));
  const width = 290;
  const labels = lineLabels(lines, (at) => (at / num_moments) * width, width);
  expect(labels.map(({ label }) => label)).toEqual(["1", "2", "3", "4", "update"]);
  labels.forEach(({ left, right }, at) => {
    expect(right).toBeLessThanOrEqual(labels[at + 1]?.left ?? width);
    if (at < 4) expect(left).toBeGreaterThan(((lines[at]?.at ?? 0) / num_moments) * width);
  });
  const crowded = Array.from({ length: 17 }, (_, at) => ({ at, label: at === 16 ? "update" : String(at + 1) }));
  expect(lineLabels(crowded, (at) => at * 17, width).at(-1)?.label).toBe("update");
});

test("products and an equation with its comma stay on one line", () => {
  const { code } = equations().markup?.({ content: "<p>16 × 4, {a} × {b}, <b>2</b> × <b>3</b>: <Tex t={String.raw`1/K`} />, so a × b</p>", filename: "a.svelte" }) as { code: string };
  expect(code).toContain("16\u00a0×\u00a04, {a}\u00a0×\u00a0{b}, <b>2</b>\u00a0×\u00a0<b>3</b>");
  expect(code).toMatch(/<span class="together"><math>.*<\/math>,<\/span> so a × b/);
});
