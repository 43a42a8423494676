/** Runs next to each other on the `anybatch watch` page. */
import { describe, expect, it } from "vitest";

import { chosenRuns, csvOf, differing, differs, latestOf, limitsOf, metricOf, metricsOf, smoothed } from "../src/watch/across";
import type { Run } from "../src/watch/types";

const points = (value: (number | null)[]) => ({ step: value.map((_, at) => at + 1), samples: value.map((_, at) => 8 * at + 8), seconds: value.map((_, at) => at / 2), value });
const NONE = points([]);

function run(name: string, settings: Record<string, string> = {}, more: Partial<Run> = {}): Run {
  return { name, settings, curves: { loss: points([3, 2, 1]), speed: NONE, norm: NONE, rate: NONE, clipped: NONE }, sketch: null, evaluations: [], last: { step: 3, samples: 24, seconds: 1, loss: 1 }, ...more } as Run;
}

const measured = run("b", {}, { evaluations: [{ step: 2, samples: 9, metrics: { accuracy: 0.5 } }, { step: 3, samples: 9, metrics: { accuracy: "NaN" } }] });

describe("metrics", () => {
  it("are all that some run has", () => {
    expect(metricsOf([run("a"), measured])).toEqual(["loss", "accuracy"]);
    expect(metricOf(measured, "accuracy", "samples")).toEqual({ x: [16, 24], y: [0.5, NaN] });
    expect([latestOf(measured, "accuracy"), latestOf(run("a"), "accuracy"), latestOf(run("a"), "loss")]).toEqual([0.5, null, 1]);
  });

  it("are smoothed without bias at the start, and keep gaps", () => {
    expect(smoothed([4, 4, NaN, 4], 0.9)).toEqual([4, expect.closeTo(4), NaN, expect.closeTo(4)]);
    expect(smoothed([0, 1], 0.5)[1]).toBeCloseTo(2 / 3);
  });

  it("have limits that one far value does not stretch", () => {
    const calm = Array.from({ length: 200 }, (_, at) => 900 + (at % 10));
    expect(limitsOf([...calm, 5000])![1]).toBeLessThan(1000);
    expect(limitsOf([2.3, 1, 0.5, 0.2])).toEqual([0.2, 2.3]);
    expect(limitsOf([NaN])).toBeNull();
  });
});

describe("the table", () => {
  const runs = [run("a", { rate: "0.1", seed: "0" }), run("b", { rate: "0.02", seed: "0" }), undefined, run("c", { seed: "0" })];
  const value = (one: Run, column: string) => (one.settings[column] === undefined ? null : Number(one.settings[column]));

  it("has a column for each setting that differs", () => {
    expect(differing([runs[0]!, runs[1]!, runs[3]!])).toEqual(["rate"]);
  });

  it("treats a missing setting as a default in runs of anybatch train, and as unknown in other loops", () => {
    const [trained, averaged, loop] = [run("d", { recipe: "digits", seed: "0" }), run("e", { recipe: "digits", seed: "0", decay: "0.9" }), run("f", { seed: "1", width: "8" })];
    expect(differing([trained, averaged, loop])).toEqual(["seed", "decay"]);
    expect(["seed", "decay", "recipe", "width"].filter((name) => differs(loop, averaged, name))).toEqual(["seed"]);
  });

  it("is filtered by words, and sorted with missing values last", () => {
    expect(chosenRuns(runs, "seed=0 rate=", null, value)).toEqual([0, 1]);
    expect(chosenRuns(runs, "", { by: "rate", descending: false }, value)).toEqual([1, 0, 2, 3]);
    expect(chosenRuns(runs, "", { by: "rate", descending: true }, value)).toEqual([0, 1, 2, 3]);
  });

  it("becomes CSV without formulas", () => {
    expect(csvOf([["a,b", "=1+1", '"', null, NaN, -1.5, "-2"]])).toBe('"a,b",\'=1+1,"""",,,-1.5,-2\r\n');
  });
});
