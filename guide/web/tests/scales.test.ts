import { describe, expect, test } from "vitest";

import { nearestAt, path, positions, spread } from "../src/math/curves";
import { accumulationSteps, units } from "../src/math/cuts";
import { stacked } from "../src/math/bars";
import { formatBytes, formatNumber, formatTick, singular } from "../src/math/format";
import { withoutOverlap, labelPosition, extent, logTicks, scale, ticks } from "../src/math/scales";

describe("places", () => {
  test("ends of the domain map to the ends of the range, on both kinds of axis", () => {
    const linear = scale([2, 10], [0, 100]);
    const log = scale([1, 1000], [0, 300], true);
    expect([linear(2), linear(6), linear(10)]).toEqual([0, 50, 100]);
    expect([log(1), log(10), log(1000)].map(Math.round)).toEqual([0, 100, 300]);
  });

  test("a domain without width still gives a position", () => {
    expect(scale([3, 3], [0, 100])(3)).toBe(0);
  });

  test("values that cannot be drawn do not stretch an axis", () => {
    expect(extent([1, Number.NaN, 5, Infinity])).toEqual([1, 5]);
    expect(extent([0, -2, 4, 8], true)).toEqual([4, 8]);
    expect(extent([])).toEqual([0, 1]);
    expect(extent([7])[0]).toBeLessThan(7);
  });

  test("marks with overlapping labels are removed", () => {
    expect(withoutOverlap([0, 1, 2, 3, 4], scale([0, 4], [0, 100]), 40)).toEqual([0, 2, 4]);
  });
});

describe("ticks", () => {
  test("are round numbers inside the domain, and exact", () => {
    expect(ticks([0, 1], 5)).toEqual([0, 0.2, 0.4, 0.6, 0.8, 1]);
    expect(ticks([0.13, 0.42], 3)).toEqual([0.2, 0.3, 0.4]);
    expect(ticks([-250, 900], 4)).toEqual([0, 500]);
    expect(ticks([8, 168], 1.8)).toEqual([50, 100, 150]);  // the noise scale on a phone: one tick shows no distance
  });

  test("exist for every domain, and not many more than requested", () => {
    for (const width of [1e-9, 3e-4, 0.7, 1, 12, 99, 4.2e7]) {
      for (const count of [2, 5, 9]) {
        const found = ticks([width / 3, width / 3 + width], count);
        expect(found.length).toBeGreaterThanOrEqual(2);
        expect(found.length).toBeLessThanOrEqual(count + 2);
      }
    }
  });

  test("on logarithmic axes are powers of ten, or finer for small domains", () => {
    expect(logTicks([1, 10000], 9)).toEqual([1, 10, 100, 1000, 10000]);
    expect(logTicks([1e-8, 1], 3)).toEqual([1e-8, 1e-5, 1e-2]);
    expect(logTicks([3, 60], 5)).toEqual([5, 10, 20, 50]);
  });
});

describe("numbers", () => {
  test("are written in the usual way", () => {
    expect(formatNumber(1234567)).toBe("1,234,567");
    expect(formatNumber(-0.012345)).toBe("−0.0123");
    expect(formatNumber(2.302585, 4)).toBe("2.303");
    expect(formatNumber(2.2e-7, 2)).toBe("2.2\u00a0×\u00a010⁻⁷");
    expect(formatNumber(0.99999, 3)).toBe("1.00");
    expect(formatNumber(Number.NaN)).toBe("not a number");
    expect(formatTick(1e-7)).toBe("10⁻⁷");
    expect(formatTick(0.0005)).toBe("0.0005");  // between 0 and 0.001 of a learning rate
    expect(formatTick(0.30000000000000004)).toBe("0.3");
  });

  test("of bytes have binary units", () => {
    expect(formatBytes(512)).toBe("512\u00a0B");
    expect(formatBytes(16 * 1024 ** 3)).toBe("16\u00a0GiB");
    expect(formatBytes(44_830_000)).toBe("42.8\u00a0MiB");
  });
});

test("labels of lines are not cut off", () => {
  expect(labelPosition(10, "linear, 256", 300)).toEqual({ x: 16, end: false });
  expect(labelPosition(290, "linear, 256", 300)).toEqual({ x: 284, end: true });
  expect(labelPosition(60, "square root, betas kept, 256", 150)).toEqual({ x: 150, end: true });
});

describe("curves", () => {
  const across = scale([0, 3], [0, 30]);
  const down = scale([0, 1], [10, 0]);

  test("break at a missing value", () => {
    expect(path({ x: [0, 1, 2, 3], y: [0, Number.NaN, 1, 0.5] }, across, down)).toBe("M0 10M20 0L30 5");
  });

  test("are read at their points", () => {
    expect(positions([{ x: [3, 1], y: [] }, { x: [1, 2], y: [] }])).toEqual([1, 2, 3]);
    expect(nearestAt({ x: [1, 2], y: [5, 6] }, 2)).toBe(6);
    expect(nearestAt({ x: [1, 2], y: [5, 6] }, 3)).toBeUndefined();
  });

  test("have a margin, and include zero if it is near", () => {
    expect(spread([0.1, 2], false)[0]).toBe(0);
    expect(spread([100, 101], false)[0]).toBeLessThan(100);
  });
});

describe("splits", () => {
  test("every sample is in one unit, and ranks share evenly", () => {
    for (const cut of [{ effective: 64, micro: 16, ranks: 1 }, { effective: 64, micro: 8, ranks: 4 }]) {
      const all = units(cut);
      expect(all.reduce((sum, unit) => sum + unit.samples, 0)).toBe(cut.effective);
      expect(all.map((unit) => unit.first)).toEqual(all.map((_, at) => at * cut.micro));
      for (let rank = 0; rank < cut.ranks; rank += 1) {
        expect(all.filter((unit) => unit.rank === rank)).toHaveLength(accumulationSteps(cut));
      }
    }
  });

  test("parts of a bar are next to each other, in one order", () => {
    const parts = stacked({ activations: 50, weights: 25 }, 100, 200);
    expect(parts.map((part) => part.name)).toEqual(["weights", "activations"]);
    expect(parts.map((part) => part.from)).toEqual([0, 50]);
  });
});

test("a unit after the number 1 loses its s only if it is a word", () => {
  expect(["samples", "tokens", "Gbit/s", "GiB", "ms", "%"].map(singular)).toEqual(["sample", "token", "Gbit/s", "GiB", "ms", "%"]);
});
