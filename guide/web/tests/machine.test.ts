import { describe, expect, it } from "vitest";

import { allowed } from "../src/math/allowed";
import { blockOf, cells } from "../src/math/halving";

describe("a split batch", () => {
  it.each([64, 32, 16, 8, 4, 2, 1])("draws micro-batches of %i as blocks: every cell once, none on another, none outside", (samples) => {
    const drawn = cells(samples);
    const { across, down } = blockOf(samples);
    const parts = Array.from({ length: 64 / samples }, (_, number) => drawn.filter(({ part }) => part === number));

    expect(new Set(drawn.map(({ x, y }) => `${x} ${y}`)).size).toBe(64);
    for (const block of parts) {
      const width = Math.max(...block.map(({ x }) => x)) - Math.min(...block.map(({ x }) => x));
      const height = Math.max(...block.map(({ y }) => y)) - Math.min(...block.map(({ y }) => y));
      expect([block.length, width, height]).toEqual([samples, (across - 1) * 19, (down - 1) * 19]);
    }
    for (const { x, y } of drawn) expect(Math.min(x, y) >= 0 && Math.max(x, y) + 17 <= 190).toBe(true);
  });
});

describe("a typed number", () => {
  const stops = [64, 32, 16, 8, 4, 2, 1];

  it("is accepted without a message if it is allowed", () => {
    expect(allowed(16, { least: 1, most: 64, stops })).toEqual({ value: 16, word: "" });
    expect(allowed(3, { least: 1, most: 256, whole: true })).toEqual({ value: 3, word: "" });
  });

  it("is never changed without a message", () => {
    expect(allowed(3, { least: 1, most: 64, stops })).toEqual({ value: 4, word: "3 is not available; the nearest value is 4." });
    expect(allowed(10_000, { least: 5, most: 1000, stops: [5, 1000] })).toEqual({ value: 1000, word: "10,000 is too large: the maximum is 1,000." });
    expect(allowed(0, { least: 1, most: 256, whole: true })).toEqual({ value: 1, word: "0 is too small: the minimum is 1." });
    expect(allowed(2.5, { least: 1, most: 256, whole: true })).toEqual({ value: 3, word: "This must be a whole number: 3." });
    expect(allowed(Number.NaN, { least: 1, most: 256 })).toEqual({ value: null, word: "This is not a number." });
  });
});
