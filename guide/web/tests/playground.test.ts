import { readFileSync } from "node:fs";

import { expect, test } from "vitest";

import { parse, read, write } from "../src/data/address";
import { NO_PROGRESS, updatedProgress } from "../src/data/progress";
import { storePins, storedPins } from "../src/data/pins";
import { addressShape, commandLine, cut, effective, fromAddress, liveStrip, memoryWarning, RunBuilder, byDrawnCategory, compareWithNative, nearest, predictedPeak, PRESETS, presetSetting, program, recordedStrip, refusal, replayedAt, sameSetting, toAddress, total, upTo, whyUnpredicted, withTask, type Opening, type Run } from "../src/data/runs";
import type { Line, Setting } from "../src/data/types";
import { peaksAbove } from "../src/math/curves";
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

test("a run above its limit is repeated with smaller micro-batches; the warning ends with the run, and never joins a refusal", () => {
  const limited: Setting = { ...usual, micro_batch_size: 32, accumulation_steps: 8, memory_limit_kib: 1536 };
  const peak = 2 * 2 ** 20;
  expect(memoryWarning(limited, opening, peak, null)).toMatch(/will run out of memory, and is repeated with smaller micro-batches/);
  expect(memoryWarning({ ...limited, micro_batch_size: 1 }, opening, peak, null)).not.toMatch(/repeated/);
  expect(memoryWarning(limited, opening, 2 ** 20, null)).toBeNull();
  expect(memoryWarning(limited, opening, peak, first)).not.toBeNull();
  expect(memoryWarning(limited, opening, peak, { ...first, setting: { ...limited } })).toBeNull();
  expect(memoryWarning({ ...limited, mistake: "zero_each" }, opening, peak, null)).toBeNull();
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
  const { step: at, sum, native } = liveStrip([...builder.seen.slice(0, 1), { ...builder.seen[1]!, step: 0 }].map((one) => ({ ...one, step: 0 })), [{ step: 0, gradient: [4] }]);
  expect([at, sum, native]).toEqual([0, [4], [4]]);
  builder.take([{ kind: "out_of_memory", micro_batch_size_before: 16, micro_batch_size_after: 8 }, { kind: "out_of_memory", micro_batch_size_before: 8, micro_batch_size_after: null }]);
  expect(builder.run.smaller_sizes).toEqual([8]);
});

test("a micro-batch keeps the number of its step, also when a shorter step begins", () => {
  const builder = new RunBuilder("a", usual);
  const at = (step: number, position: number, of: number): Line[] => [{ kind: "micro_batch", event: "begin", rank: 0, step, position, num_micro_batches: of }, { kind: "guide.micro_batch", rank: 0, step, position, gradient: [], sum: [] }];
  const [last, next] = [at(21, 3, 4), at(22, 0, 2)];
  builder.take([...last, next[0]!]); // the last step of an epoch has begun, and the strip still shows the one before
  expect(builder.seen.map(({ position, of }) => [position, of])).toEqual([[3, 4]]);
  builder.take(next.slice(1));
  expect(builder.seen.map(({ position, of }) => [position, of])).toEqual([[0, 2]]);
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

const step = (number: number): Line => ({ kind: "step", step: number, num_samples: 64, loss: number === 1 ? "NaN" : 2.5, gradient_norm: 1, learning_rates: [0.1] });

test("a run is built line by line", () => {
  const builder = new RunBuilder("a", usual);
  const evaluation = (updates: number): Line => ({ kind: "guide.evaluation", updates, accuracy: 0.5, native_accuracy: updates ? null : 0.5, answers: "73" });
  builder.take([evaluation(0), { kind: "guide.native", step: 0, loss: 2.4, gradient: [1] }, step(0), { kind: "guide.match", relative_difference: 0.5 }]);
  builder.take([{ kind: "guide.native", step: 1, loss: "Infinity", gradient: null }, { kind: "micro_batch", event: "begin", step: 1, position: 2, num_micro_batches: 16 }, step(1), evaluation(2), step(2)]);
  builder.take([{ kind: "guide.memory", category_bytes: { weights: 2 } }, { kind: "guide.memory", category_bytes: { weights: 1 } }, { kind: "a kind from later" }]);
  expect(builder.run.losses).toEqual([2.5, null, 2.5]);
  expect(builder.run.native_losses).toEqual([2.4, null]);
  expect(builder.natives).toEqual([{ step: 0, gradient: [1] }]);
  expect([builder.run.evaluated, builder.run.accuracies, builder.run.native_accuracies, builder.run.answers]).toEqual([[0, 2], [0.5, 0.5], [0.5, null], ["73", "73"]]);
  expect([builder.position, builder.of]).toEqual([2, 16]);
  expect(builder.run.relative_differences).toEqual([0.5]);
  expect(builder.run.peak).toEqual({ weights: 2 });
  builder.take([step(3), { kind: "end", status: "completed", digest: "abc" }]);
  expect([builder.run.status, builder.run.digest]).toEqual(["completed", "abc"]);
});

test("each preset is a recorded run, so that it also works without an engine", () => {
  const grids = ["digits", "spirals", "shapes", "text"].map((task) => (JSON.parse(readFileSync(new URL(`../recordings/playground_${task}.json`, import.meta.url), "utf-8")) as { data: { runs: Run[] } }).data);
  const runs = [...opening.runs, ...grids.flatMap((grid) => grid.runs)];
  const found = PRESETS.map((preset) => runs.find((run) => sameSetting(run.setting, presetSetting(preset, opening))));
  expect(found.filter((run) => run === undefined)).toEqual([]);
  expect(found.map((run) => compareWithNative(run as Run).kind)).toEqual(["other", "other", "same", "same", "same", "same"]);
  expect(found[3]?.smaller_sizes.length).toBeGreaterThan(0);
  // Their gradients are recorded: those of correct ones fill the outline, up to the rounding of the levels.
  const strips = found.map((run) => recordedStrip(run as Run));
  expect(strips.map((strip) => strip !== null)).toEqual([true, true, false, true, true, true]);
  for (const strip of [strips[3], strips[4], strips[5]]) strip?.sum.forEach((level, place) => expect(Math.abs(level - (strip.native[place] ?? 0))).toBeLessThanOrEqual(2));
  const undivided = recordedStrip(upTo(found[0] as Run, 1));
  expect([undivided?.step, Math.max(...(undivided?.sum ?? []).map(Math.abs)), Math.max(...(undivided?.native ?? []).map(Math.abs))]).toEqual([0, 127, 32]);
});

test("a replay shows the first steps of every column", () => {
  const begun = upTo(first, 7);
  expect([begun.losses.length, begun.native_losses.length, begun.first_update_difference]).toEqual([7, 7, first.first_update_difference]);
  expect(begun.evaluated.every((updates) => updates <= 7)).toBe(true);
  expect(begun.evaluated.length).toBeGreaterThan(1);
  expect([begun.accuracies.length, begun.answers.length]).toEqual([begun.evaluated.length, begun.evaluated.length]);
  expect(upTo(first, 1).peak).toEqual({});
});

test("the first steps of the initial replay fill the gradient, micro-batch by micro-batch", () => {
  const seen = Array.from({ length: 200 }, (_, tenths) => replayedAt(tenths / 20, first));
  const places = [...new Set(seen.filter((at) => at !== null).map(({ steps, added }) => `${steps}:${added}`))];
  expect(places.slice(0, 16)).toEqual([0, 1, 2].flatMap((step) => [0, 1, 2, 3, 4].map((added) => `${step}:${added}`)).concat("3:0"));
  const ends = seen.indexOf(null) / 20;
  expect([ends > 4, ends < 8]).toEqual([true, true]);
  for (const step of [0, 1, 2]) {
    const strips = [1, 2, 3, 4].map((added) => recordedStrip(upTo(first, step), added)!);
    expect(strips.map((strip) => [strip.step, strip.added])).toEqual([1, 2, 3, 4].map((done) => [step, { done, of: 4 }]));
    const missing = strips.map(({ sum, native }) => Math.hypot(...native.map((level, at) => level - sum[at]!)) / Math.hypot(...native));
    expect(missing[0]).toBeGreaterThan(0.5);
    expect(missing[3]).toBeLessThan(0.03);
  }
  expect(recordedStrip(first)).toMatchObject({ step: 39, seen: [] });
  expect(recordedStrip(first)?.added).toBeUndefined();
});

test("the native batch of a correct split has the same losses and accuracies", () => {
  first.losses.forEach((loss, at) => expect(Math.abs((loss ?? 0) - (first.native_losses[at] ?? 0))).toBeLessThan(1e-3));
  expect(first.accuracies.at(-1)).toBeGreaterThan(0.8);
  expect(Math.abs((first.accuracies.at(-1) ?? 0) - (first.native_accuracies.at(-1) ?? 0))).toBeLessThan(0.01);
});

test("values above the axis are marked at the peak of each stretch", () => {
  expect(peaksAbove({ x: [1, 2, 3, 4, 5, 6], y: [1, 5, 7, 2, Number.NaN, 4] }, 3)).toEqual([{ x: 3, y: 7 }, { x: 6, y: 4 }]);
  expect(peaksAbove({ x: [1, 2, 3], y: [5, Number.NaN, 4] }, 3)).toEqual([{ x: 1, y: 5 }, { x: 3, y: 4 }]);
  expect(peaksAbove({ x: [1], y: [3] }, 3)).toEqual([]);
  const wrong = opening.runs.find(({ setting }) => setting.mistake === "no_division") as Run;
  const losses = wrong.losses.map((loss) => loss ?? Number.NaN);
  expect(peaksAbove({ x: losses.map((_, at) => at), y: losses }, 3.1)[0]?.y).toBe(Math.max(...losses));
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
  expect(predictedPeak({ ...usual, precision: "bf16" }, runs)).toBeNull();
  expect(whyUnpredicted({ ...usual, precision: "bf16" })).toContain("bfloat16");
});

test("memory of text is predicted with and without accumulation", () => {
  const { data } = JSON.parse(readFileSync(new URL("../recordings/playground_text.json", import.meta.url), "utf-8")) as { data: { runs: Run[] } };
  const correct = data.runs.filter(({ setting }) => setting.mistake === "");
  for (const run of correct) expect(predictedPeak(run.setting, data.runs)).toBe(total(run.peak));
  for (const run of data.runs.filter(({ setting }) => setting.mistake !== "")) {
    const found = predictedPeak({ ...run.setting, mistake: "" }, data.runs) ?? 0;
    expect(Math.abs(found - total(run.peak)) / total(run.peak)).toBeLessThan(0.05);
  }
});

test("a run is judged by its first update, with a reason for a difference", () => {
  const judged = (setting: Partial<Setting>, gradient: number | null, last: number | null) =>
    compareWithNative({ ...first, setting: { ...usual, ...setting }, first_update_difference: gradient, relative_differences: last === null ? [] : [last] });
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
