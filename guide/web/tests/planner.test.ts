/** Table look-ups of the planner compared with Python's plans, a thousand random cases: guide/tests/planner_cases.py writes them. */
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";

import { describe, expect, test } from "vitest";

import { EFFECTIVE_BATCH_SIZES, evenSize, NUM_RANKS, plan, type PlannerData } from "../src/math/planner";
import { CATEGORIES, geometry, inBytes, planLines } from "../src/math/words";

type Case = [
  variant: number, device: string, total: number, effective: number, ranks: number,
  largest: number, size: number, steps: number, peak: number, reserved: number,
  activations: number, binds: string, digest: string,
];

const file = (path: string) => new URL(path, import.meta.url);
const golden = JSON.parse(readFileSync(file("planner.golden.json"), "utf8")) as Case[];
const data = (JSON.parse(readFileSync(file("../recordings/memory_planner.json"), "utf8")) as { data: PlannerData }).data;

describe("a plan", () => {
  test("equals Python's plan, in a thousand random cases", () => {
    expect(golden.length).toBe(1000);
    const wrong = [];
    for (const row of golden) {
      const [number, device, total, effective, ranks, ...expected] = row;
      const found = plan(data, data.variants[number]!, { device, effective, ranks });
      expect(found.budget.total).toBe(total);
      const activations = found.peak.held[data.categories.indexOf("activations")];
      const digest = createHash("sha256").update(planLines(found).join("\n")).digest("hex").slice(0, 16);
      const numbers = [found.largest, found.size, found.steps, found.peak.bytes, found.reserved, activations, found.binds, digest];
      if (JSON.stringify(numbers) !== JSON.stringify(expected)) wrong.push({ row, numbers, words: planLines(found) });
    }
    expect(wrong).toEqual([]);
  });

  test("exists only for recorded settings", () => {
    expect(data.categories).toEqual(CATEGORIES);
    expect(data.num_ranks).toEqual(NUM_RANKS);
    expect(data.effective_batch_sizes).toEqual(EFFECTIVE_BATCH_SIZES);
  });

  test("exists for every choice", { timeout: 120_000 }, () => {
    for (const variant of data.variants) {
      for (const { name: device } of data.devices) {
        for (const ranks of NUM_RANKS.filter((number) => number > 1 === variant.several)) {
          for (const effective of EFFECTIVE_BATCH_SIZES) expect(plan(data, variant, { device, effective, ranks }).reserved).toBeGreaterThan(0);
        }
      }
    }
  });

  test("never uses more than the device may give, and adds up", () => {
    for (const [number, device, , effective, ranks] of golden) {
      const found = plan(data, data.variants[number]!, { device, effective, ranks });
      expect(found.peak.held.reduce((sum, bytes) => sum + bytes, 0)).toBe(found.peak.bytes);
      if (found.largest) expect(found.reserved).toBeLessThanOrEqual(found.budget.total - found.budget.outside - found.budget.workspace);
      expect(found.size * found.steps * ranks).toBeGreaterThanOrEqual(effective);
    }
  });
});

describe("numbers", () => {
  test("are split into even parts", () => {
    expect(evenSize(64, 20)).toBe(16);
    expect(evenSize(64, 64)).toBe(64);
    expect(evenSize(5, 2)).toBe(2);
  });

  test("are rounded as Python rounds them, half to even", () => {
    expect([1.125, 1.375, 2.5].map((value) => inBytes(value * 2 ** 30))).toEqual(["1.12 GiB", "1.38 GiB", "2.50 GiB"]);
    expect([999, 1000, 1023.5 * 1024, 0].map(inBytes)).toEqual(["999 bytes", "0.977 KiB", "1.00 MiB", "0 bytes"]);
  });
});

describe("geometry", () => {
  test("shows ragged shares", () => {
    expect(geometry(256, 2, 16)).toBe("256 samples = 2 ranks x 8 micro-batches x 16");
    expect(geometry(64, 3, 11)).toBe("64 samples = 3 ranks x 2 micro-batches x 11, ragged: rank 0: 2 x 11; ranks 1-2: 11 + 10");
    expect(geometry(1, 2, 1)).toBe("1 sample = 2 ranks x 1 micro-batch x 1, ragged: rank 0: 1; rank 1: nothing");
  });
});
