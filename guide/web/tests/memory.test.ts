import { readFileSync } from "node:fs";

import { expect, test } from "vitest";

import { peakOfSplit, type Accumulation } from "../src/sections/memory/data";

const { data } = JSON.parse(readFileSync(new URL("../recordings/memory_accumulation.json", import.meta.url), "utf-8")) as { data: Accumulation };
const [way] = data.ways;
const at = (effective: number, micro: number) => peakOfSplit(data, way!, effective, micro);

test("peaks and operations of 64 samples are those of the recording", () => {
  data.micro_sizes.forEach((size, place) => {
    const split = at(64, size);
    expect([split.bytes, split.operations, split.recorded]).toEqual([way!.cuts[place]!.num_bytes, way!.operations[place], true]);
    expect(split.held.reduce((all, bytes) => all + bytes, 0)).toBe(split.bytes);
  });
});

test("other effective batches differ by the inputs of samples that wait, and by whole passes", () => {
  const inputs = (at(128, 16).bytes - at(64, 16).bytes) / 64;
  expect(inputs).toBe(512); // 32 tokens and 32 targets of 8 bytes
  expect(at(256, 16).bytes - at(64, 16).bytes).toBe(192 * inputs);
  expect(at(16, 16).bytes).toBe(way!.alone[data.alone_sizes.indexOf(16)]!.num_bytes);
  expect(at(128, 64).bytes).toBe(way!.twice["64"]!.num_bytes);
  expect(at(128, 16).recorded).toBe(false);
  const perPass = at(128, 4).operations - at(128, 8).operations;
  expect(at(256, 1).operations).toBeCloseTo(at(256, 2).operations + 8 * perPass, 0);
});

test("along the curve memory falls and work rises, for each effective batch", () => {
  for (const effective of [16, 32, 64, 128, 256]) {
    const splits = data.alone_sizes.filter((size) => size <= effective).map((size) => at(effective, size));
    splits.slice(1).forEach((split, before) => {
      expect(split.bytes).toBeLessThan(splits[before]!.bytes);
      expect(split.operations).toBeGreaterThan(splits[before]!.operations);
    });
  }
});
