import { readFileSync } from "node:fs";

import { expect, test } from "vitest";

import { peakOfSplit, secondsOfSplit, type Accumulation, type SplitTimes } from "../src/sections/memory/data";

const { data } = JSON.parse(readFileSync(new URL("../recordings/memory_accumulation.json", import.meta.url), "utf-8")) as { data: Accumulation };
const { data: times } = JSON.parse(readFileSync(new URL("../recordings/split_times.json", import.meta.url), "utf-8")) as { data: SplitTimes };
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

test("every split has a measured time; single samples take longest, and twice the samples twice as long", () => {
  expect([times.effective, times.micro_sizes]).toEqual([data.effective, data.micro_sizes]);
  data.ways.forEach((_, number) => {
    const seconds = data.micro_sizes.map((size) => secondsOfSplit(times, number, 64, size));
    expect(seconds).toEqual(times.ways[number]!.seconds);
    expect(seconds.at(-1)).toBe(Math.max(...seconds));
    expect(Math.min(...seconds)).toBeGreaterThan(0);
    expect(secondsOfSplit(times, number, 128, 16)).toBe(2 * secondsOfSplit(times, number, 64, 16));
    expect(secondsOfSplit(times, number, 256, 256)).toBe(4 * secondsOfSplit(times, number, 64, 64));
  });
  expect(times.ways.map(({ spread: _spread, seconds: _seconds, ...config }) => config)).toEqual(data.ways.map(({ optimizer, precision, checkpointing }) => ({ optimizer, precision, checkpointing })));
});
