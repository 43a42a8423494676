/** The arithmetic and the sentences of the `anybatch watch` page. */
import { describe, expect, it } from "vitest";

import { closestTo, path, zoomed } from "../src/math/curves";
import { ticks } from "../src/math/scales";
import type { Run, Verdict } from "../src/watch/types";
import { along, formatSeconds, reasonOf, stateOf, formatValue, verdictOf } from "../src/watch/words";

const VERDICT: Verdict = { word: "same", step: null, num_steps: 5, difference: 0, tolerance: 1e-4, reasons: [] };

function run(more: Partial<Run>): Run {
  return { state: "open", read: 10, size: 10, message: null, ...more } as Run;
}

describe("curves", () => {
  it("are read at the point nearest to x, and not outside of their range", () => {
    const curve = { x: [0, 10, 20], y: [1, 2, NaN] };
    expect([0, 4, 6, 10, 14].map((place) => closestTo(curve, place))).toEqual([1, 1, 2, 2, 2]);
    expect([-1, 19, 21].map((place) => closestTo(curve, place))).toEqual([undefined, undefined, undefined]);
    expect(closestTo({ x: [], y: [] }, 0)).toBeUndefined();
  });

  it("are zoomed about a place, within their range", () => {
    expect(zoomed([0, 100], [0, 100], 30, 0.5)).toEqual([15, 65]);
    expect(zoomed([15, 65], [0, 100], 65, 0.5)).toEqual([40, 65]);
    expect(zoomed([60, 80], [0, 100], 60, 2)).toEqual([60, 100]);
    expect(zoomed([60, 90], [0, 100], 70, 2)).toEqual([40, 100]);
    expect(zoomed([40, 100], [0, 100], 70, 2)).toBeNull();
  });

  it("stay near their chart, however large a value is", () => {
    const one = Object.assign((value: number) => value, { log: false }) as Parameters<typeof path>[1];
    expect(path({ x: [0, 1, 2], y: [5, 1e12, -1e12] }, one, one)).toBe("M0 5L1 10000L2 -10000");
  });

  it("have gaps at missing values", () => {
    const points = { step: [0, 1], samples: [8, 16], seconds: [0.5, 1], value: [1, null] };
    expect(along(points, "samples")).toEqual({ x: [8, 16], y: [1, NaN] });
  });

  it("never have two ticks in one place, even for large numbers", () => {
    for (const domain of [[2 ** 53 - 2, 2 ** 53 - 1], [1e-30, 2e-30], [4e12, 4e12 + 1]] as const) {
      const found = ticks(domain, 9);
      expect(new Set(found).size).toBe(found.length);
    }
  });
});

describe("sentences", () => {
  it("show the state of a run", () => {
    expect(stateOf(run({}), 3).word).toBe("running");
    expect(stateOf(run({}), 3600).word).toBe("no new line for 60 min");
    expect(stateOf(run({ read: 3 }), 3600).word).toBe("reading, 30%");
    expect(stateOf(run({ state: "failed" }), 0)).toEqual({ word: "failed", kind: "bad" });
  });

  it("compare a run with another one, with the reason", () => {
    expect(verdictOf(VERDICT).word).toBe("same, bit for bit");
    expect(verdictOf({ ...VERDICT, difference: 1e-7 }).word).toBe("same");
    expect(verdictOf({ ...VERDICT, word: "drifted", step: 1200 }).word).toBe("drifted since step 1,200");
    const another: Verdict = { ...VERDICT, word: "another", difference: 0.5, reasons: ["seed: 0 there, 1 here"] };
    expect(reasonOf(another, "first")).toBe(
      "seed: 0 there, 1 here. 5 steps in common with first, losses at most 0.50 apart (relative); more than 0.0001 counts as more than rounding.",
    );
  });

  it("show times and numbers in the usual format", () => {
    expect([2e-5, 0.25, 42, 600, 7500, 4e5].map(formatSeconds)).toEqual(["20.0 µs", "250 ms", "42.0 s", "10 min", "2 h 5 min", "4 d 15 h"]);
    expect([null, "NaN", "Infinity", 0.25].map((value) => formatValue(value))).toEqual(["–", "not a number", "∞", "0.2500"]);
  });
});
