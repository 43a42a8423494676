import { readFileSync } from "node:fs";

import { expect, test } from "vitest";

import { placed } from "../src/sections/batch_size/placed";
import { best, computed, mean, padding, samplesFor, stepsFor, type LengthCuts, type Rates } from "../src/sections/batch_size/sizes";

const recorded = <Data>(name: string) => (JSON.parse(readFileSync(new URL(`../recordings/${name}.json`, import.meta.url), "utf-8")) as { data: Data }).data;

test("a mean over seeds is infinite if one of them is", () => {
  expect(mean([1, 2])).toBe(1.5);
  expect(mean([1, "Infinity"])).toBe(Infinity);
});

test("the best rate is that of the recording", () => {
  for (const map of recorded<Rates>("rates_by_batch").maps) {
    expect(map.batch_sizes.map((size) => best(map, size).rate)).toEqual(map.best_rates);
  }
});

test("at the noise scale a batch takes twice the minimum of steps and twice the minimum of samples", () => {
  expect([stepsFor(64, 64), samplesFor(64, 64)]).toEqual([2, 2]);
  expect(stepsFor(1, 1000) / stepsFor(2, 1000)).toBeCloseTo(2, 2);
  expect(samplesFor(2000, 1) / samplesFor(1000, 1)).toBeCloseTo(2, 2);
});

test("padding is the computed tokens that belong to no sentence", () => {
  expect(computed([[3, 5], [2]])).toBe(12);
  expect(padding([[3, 5], [2]])).toBeCloseTo(2 / 12);
  expect(padding([[4, 4], [1]])).toBe(0);
});

test("every split has all sentences once, and the budget never computes more than splits of one size", () => {
  const { lengths, caps, ways } = recorded<LengthCuts>("length_cuts");
  const all = [...lengths].sort((a, b) => a - b);
  for (const cap of caps) {
    const own = ways.filter((one) => one.cap === cap);
    expect(own.map((one) => one.way)).toEqual(["arrival", "sorted", "token_budget"]);
    for (const { cuts } of own) {
      expect(cuts.flat().sort((a, b) => a - b)).toEqual(all);
      for (const cut of cuts) expect(computed([cut])).toBeLessThanOrEqual(cap);
    }
    const cost = own.map(({ cuts }) => computed(cuts) + 16 * cuts.length);
    expect(cost[2]).toBeLessThanOrEqual(Math.min(cost[0]!, cost[1]!));
  }
});

test("micro-batches are drawn next to each other, within the width and without overlap", () => {
  const cuts = [[10, 40], [40], [5, 6, 7], [50, 50]];
  const blocks = placed(cuts, 2, 9, 200);
  for (const block of blocks) expect(block.x + block.longest * 2).toBeLessThanOrEqual(200);
  const [first, , third] = blocks;
  expect(third!.y).toBeGreaterThanOrEqual(first!.y + first!.height);
  expect(blocks.map((block) => block.cut)).toEqual(cuts);
});
