import { readFileSync } from "node:fs";

import { expect, test } from "vitest";

import { bars, beyond } from "../src/math/strips";

test("a triangle marks each bar that is longer than its box, at the end where it is cut off", () => {
  expect(beyond([0.5, -1, 1], 1, 300, 80)).toBe("");
  const [above = "", below = ""] = beyond([1.2, 0, -3], 1, 300, 80).split("z");
  expect(above).toMatch(/^M50 -5/);
  expect(below).toMatch(/^M250 85/);
});

interface SplitSum {
  whole: number[];
  weights: number[];
  learning_rate: number;
  cuts: { sums: number[][]; updated: number[]; wrong_sums?: number[][]; wrong_updated?: number[] }[];
}

test("the recorded wrong sums leave the picture, and an update is the weights minus the rate times the sum", () => {
  const { whole, weights, learning_rate, cuts } = (JSON.parse(readFileSync(new URL("../recordings/split_sum.json", import.meta.url), "utf-8")) as { data: SplitSum }).data;
  const limit = 1.04 * Math.max(...whole.map(Math.abs));
  for (const { sums, updated, wrong_sums, wrong_updated } of cuts) {
    const last = sums.at(-1)!;
    expect(beyond(last, limit, 900, 80)).toBe("");
    updated.forEach((value, at) => expect(Math.abs(value - (weights[at]! - learning_rate * last[at]!))).toBeLessThan(2));
    if (wrong_sums) wrong_updated!.forEach((value, at) => expect(Math.abs(value - (weights[at]! - learning_rate * wrong_sums.at(-1)![at]!))).toBeLessThan(2));
  }
  expect(cuts.some(({ wrong_sums }) => beyond(wrong_sums?.at(-1) ?? [], limit, 900, 80) !== "")).toBe(true);
  expect(bars([2], 1, 10, 20)).toBe(bars([1], 1, 10, 20));
});
