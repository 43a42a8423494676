import { readFileSync } from "node:fs";

import { expect, test } from "vitest";

import { parse, read, write } from "../src/data/address";
import { NO_PROGRESS, updatedProgress } from "../src/data/progress";
import { storePins, storedPins } from "../src/data/pins";
import { addressShape, commandLine, cut, effective, fromAddress, RunBuilder, byDrawnCategory, compareWithNative, stripLimit, nearest, predictedPeak, program, refusal, sameSetting, toAddress, total, withTask, type Opening, type Run } from "../src/data/runs";
import type { Line, Setting } from "../src/data/types";
import { pixels } from "../src/math/images";
import { cuts, pieces, shape } from "../src/sections/claims/claims";

const { data: opening } = JSON.parse(readFileSync(new URL("../recordings/playground_opening.json", import.meta.url), "utf-8")) as { data: Opening };
const first = opening.runs[0] as Run;
const usual = first.setting;

test("programs and command lines equal those from Python", () => {
  for (const { setting, python, command } of opening.examples) {
    expect(program(opening, setting)).toBe(python);
    expect(commandLine(setting, usual)).toBe(command);
  }
});

test("a setting survives a round trip through an address", () => {
  const setting: Setting = { ...usual, task: "shapes", norm: "group", micro_batch_size: 24, learning_rate: 0.00001, mistake: "drop_tail", ranks: 2, norm_policy: "sync", memory_limit_kib: 768 };
  const { values } = parse(write("playground", toAddress(setting)));
  expect(fromAddress(read(addressShape, values, toAddress(usual)))).toEqual(setting);
});

test("settings that the engine refuses are refused", () => {
  expect(refusal(usual, opening)).toBeNull();
  for (const change of [
    { micro_batch_size: 256, accumulation_steps: 64 },
    { micro_batch_size: 256, accumulation_steps: 16, steps: 2000 },
    { mistake: "zero_each", precision: "bf16" },
    { norm: "batch" },
    { ranks: 2, mistake: "zero_each" },
    { memory_limit_kib: 512, mistake: "zero_each" },
    { norm_policy: "exact" },
    { task: "shapes", norm: "batch", norm_policy: "ghost", micro_batch_size: 2 },
    { ranks: 2, micro_batch_size: 256, accumulation_steps: 16, steps: 1 },
    { task: "text", micro_batch_size: 256, accumulation_steps: 16, steps: 1 },
  ] as Partial<Setting>[]) {
    expect(refusal({ ...usual, ...change }, opening)).not.toBeNull();
  }
});

test("the nearest run keeps the last change", () => {
  const wish: Setting = { ...usual, mistake: "zero_each", micro_batch_size: 64 };
  expect(nearest(wish, opening.runs, "mistake")?.setting.mistake).toBe("zero_each");
  expect(nearest({ ...usual, task: "text" }, opening.runs)).toBeUndefined();
  expect(sameSetting(nearest(usual, opening.runs)?.setting ?? wish, usual)).toBe(true);
});

test("the nearest run has the requested ranks, policy and limit", () => {
  const made = (change: Partial<Setting>): Run => ({ ...first, setting: { ...usual, ...change } });
  const runs = [{}, { ranks: 2 }, { memory_limit_kib: 1024 }, { memory_limit_kib: 4096 }, { norm_policy: "exact" as const, micro_batch_size: 4 }].map(made);
  expect(nearest({ ...usual, ranks: 2, micro_batch_size: 64 }, runs)?.setting.ranks).toBe(2);
  expect(nearest({ ...usual, memory_limit_kib: 900 }, runs)?.setting.memory_limit_kib).toBe(1024);
  expect(nearest({ ...usual, norm_policy: "exact" }, runs)?.setting.norm_policy).toBe("exact");
  expect([cut(usual), cut({ ...usual, ranks: 2 }), effective({ ...usual, ranks: 2 })]).toEqual(["16 × 4", "16 × 4 × 2", 128]);
});

test("lines of two ranks, a limit and single micro-batches build a run", () => {
  const builder = new RunBuilder("a", { ...usual, ranks: 2 });
  const begin = (rank: number, position: number): Line => ({ kind: "micro_batch", event: "begin", rank, step: 0, position, time_seconds: 0 });
  const sent = (event: string, step: number, payload = "gradients"): Line => ({ kind: "reduction", event, payload, step, num_bytes: 100 });
  const seen = (rank: number, position: number): Line => ({ kind: "guide.micro_batch", rank, position, num_samples: 16, samples: { kind: "points", values: [] }, gradient: [-3, 1], sum: [2] });
  builder.take([begin(0, 1), begin(1, 2), sent("begin", 0), sent("begin", 1), sent("end", 1), sent("begin", 1, "other"), sent("begin", 1), sent("begin", 2)]);
  expect([builder.position, builder.second, builder.run.reduced_bytes]).toEqual([1, 2, 200]);
  builder.take([seen(1, 0), seen(0, 0), seen(1, 1)]);
  expect(builder.seen.map(({ rank, position }) => [rank, position])).toEqual([[0, 0], [1, 1]]);
  expect(stripLimit(builder.seen[0]!)).toBe(3);
  builder.take([{ kind: "out_of_memory", micro_batch_size_before: 16, micro_batch_size_after: 8 }, { kind: "out_of_memory", micro_batch_size_before: 8, micro_batch_size_after: null }]);
  expect(builder.run.smaller_sizes).toEqual([8]);
});

test("images are next to each other, with a line between them", () => {
  const two = pixels(btoa(String.fromCharCode(1, 2, 3, 4, 5, 6, 7, 8)), 2, 8);
  expect([two.width, two.height]).toEqual([5, 2]);
  const levels = [...two.data].filter((_, at) => at % 4 === 0);
  expect(levels).toEqual([1, 2, 0, 5, 6, 3, 4, 0, 7, 8]);
  expect(pixels(btoa(String.fromCharCode(1, 2, 3)), 1, 2)).toMatchObject({ width: 3, height: 3 });
});

test("another task starts with its default values", () => {
  const shapes = withTask(usual, "shapes", opening);
  expect([shapes.norm, shapes.learning_rate]).toEqual([opening.beginnings.shapes.norm, opening.beginnings.shapes.adamw]);
});

test("a run is built line by line", () => {
  const builder = new RunBuilder("a", usual);
  const step = (number: number, time: number): Line => ({ kind: "step", step: number, num_samples: 64, loss: number === 1 ? "NaN" : 2.5, gradient_norm: 1, learning_rates: [0.1], time_seconds: time });
  const begin = (number: number, time: number): Line => ({ kind: "micro_batch", event: "begin", step: number, position: 0, time_seconds: time });
  builder.take([begin(0, 0), step(0, 5), begin(1, 5), step(1, 9), { kind: "guide.match", relative_difference: 0.5 }]);
  builder.take([begin(2, 10), step(2, 12), { kind: "guide.memory", category_bytes: { weights: 2 } }, { kind: "guide.memory", category_bytes: { weights: 1 } }, { kind: "a kind from later" }]);
  expect(builder.run.losses).toEqual([2.5, null, 2.5]);
  expect(builder.run.relative_differences).toEqual([0.5]);
  expect(builder.run.samples_per_second).toBe(32);
  expect(builder.run.peak).toEqual({ weights: 2 });
  builder.take([begin(3, 20)]);
  builder.pause();
  builder.take([step(3, 90), { kind: "end", status: "completed", digest: "abc" }]);
  expect(builder.run.samples_per_second).toBe(32);
  expect([builder.run.status, builder.run.digest]).toEqual(["completed", "abc"]);
});

test("a step whose first line was missed, as after a reload, has no speed", () => {
  const builder = new RunBuilder("a", usual);
  const step = (number: number, time: number): Line => ({ kind: "step", step: number, num_samples: 64, loss: 1, gradient_norm: 1, learning_rates: [0.1], time_seconds: time });
  builder.take([step(20, 900)]);
  expect(builder.run.samples_per_second).toBeNull();
  builder.take([{ kind: "micro_batch", event: "begin", step: 21, position: 0, time_seconds: 900 }, step(21, 902), step(22, 990)]);
  expect(builder.run.samples_per_second).toBe(32);
});

test("merging seven categories into five loses nothing", () => {
  expect(Object.values(byDrawnCategory(first.peak)).reduce((sum, bytes) => sum + bytes, 0)).toBe(total(first.peak));
});

test("a claim's text is words and numbers", () => {
  expect(pieces("from {a} to {b}.")).toEqual([{ words: "from " }, { name: "a" }, { words: " to " }, { name: "b" }, { words: "." }]);
  expect(pieces("by `anybatch check`")).toEqual([{ words: "by " }, { code: "anybatch check" }]);
  expect(cuts("time of 16 x 4 against 64 x 1; x 2")).toBe("time of 16\u00a0×\u00a04 against 64\u00a0×\u00a01; x 2");
  expect(shape({ label: "", unit: "x", value: "Infinity" }).value).toBe(Infinity);
  expect(shape({ label: "", unit: "bytes", value: 5 })).toEqual({ value: 5, unit: "bytes" });
});

test("memory is predicted from recorded runs, within five percent", () => {
  const { data } = JSON.parse(readFileSync(new URL("../recordings/playground_digits.json", import.meta.url), "utf-8")) as { data: { runs: Run[] } };
  const runs = data.runs.filter(({ setting }) => setting.optimizer === "sgd" && setting.mistake === "" && setting.accumulation_steps === 16);
  const without = (size: number) => runs.filter(({ setting }) => setting.micro_batch_size !== size);
  for (const size of [4, 16]) {
    const truth = runs.find(({ setting }) => setting.micro_batch_size === size) as Run;
    const found = predictedPeak(truth.setting, without(size)) ?? 0;
    expect(Math.abs(found - total(truth.peak)) / total(truth.peak)).toBeLessThan(0.05);
  }
  const limited = runs.map((run) => ({ ...run, setting: { ...run.setting, memory_limit_kib: 512 }, peak: { weights: 1 } }));
  const asked = { ...usual, optimizer: "sgd" as const, micro_batch_size: 4, memory_limit_kib: 512 };
  expect(predictedPeak(asked, [...runs, ...limited])).toBe(predictedPeak(asked, runs));
  expect(predictedPeak({ ...usual, task: "text" }, runs)).toBeNull();
});

test("a run is judged by its first update, with a reason for a difference", () => {
  const judged = (setting: Partial<Setting>, gradient: number | null, last: number | null) =>
    compareWithNative({ ...first, setting: { ...usual, ...setting }, first_gradient_difference: gradient, relative_differences: last === null ? [] : [last] });
  expect(judged({}, 1e-7, 1e-6).kind).toBe("same");
  expect(judged({}, 1e-7, 0.3)).toMatchObject({ kind: "drift", words: expect.stringContaining("rounding") as string });
  expect(judged({ mistake: "no_division" }, 3, 0.01)).toMatchObject({ kind: "other", words: expect.stringContaining("not divided") as string });
  expect(judged({ task: "shapes", norm: "batch" }, 0.1, 0.2)).toMatchObject({ kind: "other", words: expect.stringContaining("BatchNorm") as string });
  expect(judged({ task: "shapes", norm: "batch", norm_policy: "freeze" }, 0.9, 0.2).words).toContain("fixed");
  expect(judged({ task: "shapes", norm: "batch", norm_policy: "exact" }, 1e-7, 1e-7).kind).toBe("same");
  expect(judged({ mistake: "drop_tail" }, 1e-7, 0.2)).toMatchObject({ kind: "other", words: expect.stringContaining("skipped") as string });
  expect(judged({ mistake: "drop_tail" }, 1e-7, 0.2).words).toContain("first update");
  expect(judged({}, 1e-7, 0.3).words).toContain("first update");
  expect(judged({ precision: "bf16" }, 1e-2, 1e-2).kind).toBe("same");
  expect(judged({}, null, null).kind).toBe("none");
});

test("pins survive, and invalid data does not", () => {
  const kept = new Map<string, string>();
  const store = { getItem: (name: string) => kept.get(name) ?? null, setItem: (name: string, text: string) => void kept.set(name, text) };
  const pin = { run: first, from: { kind: "recorded", name: "playground_opening" } as const };
  expect(storedPins(store)).toEqual([]);
  storePins([pin], store);
  expect(storedPins(store)).toEqual([pin]);
  for (const text of ["{", "{}", "[null, 1, {\"run\": {}}]"]) {
    store.setItem("anybatch-pins", text);
    expect(storedPins(store)).toEqual([]);
  }
});

test("news belongs to one run, and one of one is no progress", () => {
  const step = (number: number): Line => ({ kind: "step", step: number, loss: 0.5 });
  let progress = updatedProgress(NO_PROGRESS, "a", [step(3)]);
  expect(progress).toMatchObject({ run: "a", step: 4, loss: 0.5 });
  progress = updatedProgress(progress, "b", [{ kind: "guide.progress", done: 1, of: 40, what: "rounds" }]);
  expect(progress).toEqual({ run: "b", step: null, loss: null, progress: "rounds, 1 of 40", part: 1 / 40 });
  expect(updatedProgress(progress, "b", [{ kind: "guide.progress", done: 0, of: 1, what: "lines" }])).toMatchObject({ progress: "lines", part: null });
});
