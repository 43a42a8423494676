import { readFileSync } from "node:fs";

import { expect, test } from "vitest";

import { exposed, links, nameOf, printed, sentBytes, split, type Forecasts, type RankStep, type Timeline } from "../src/sections/devices/timeline";

const recorded = <Data>(name: string) => (JSON.parse(readFileSync(new URL(`../recordings/${name}.json`, import.meta.url), "utf-8")) as { data: Data }).data;

const STEP: RankStep = {
  seconds: 10,
  micro_batches: [{ begin: 0, end: 4 }, { begin: 4, end: 9.5 }],
  layers: [{ layer: 1, ready: 5 }, { layer: 0, ready: 6 }],
  buckets: [
    { micro_batch: 1, bucket: 0, bytes: 100, sent: 5, done: 7 },
    { micro_batch: 1, bucket: 1, bytes: 20, sent: 6, done: 9 },
  ],
};

test("exposed communication is the time between the last gradient and the last sum", () => {
  expect(exposed(STEP)).toEqual({ from: 6, to: 9 });
  expect(sentBytes(STEP)).toBe(120);
  const hidden = { ...STEP, buckets: STEP.buckets.map((one) => ({ ...one, done: 5.5 })) };
  expect(exposed(hidden)).toEqual({ from: 6, to: 6 });
});

test("exposed time is waiting until the last other rank has sent its last bucket, and transfer from then on", () => {
  const late = { ...STEP, layers: [{ layer: 0, ready: 8 }], buckets: STEP.buckets.map((one) => ({ ...one, sent: 7 + one.bucket, done: 9 })) };
  expect(split(STEP, [STEP, late])).toEqual({ from: 6, sent: 8, to: 9, waiting: 2, transfer: 1 });
  expect(split(late, [STEP, late])).toEqual({ from: 8, sent: 8, to: 9, waiting: 0, transfer: 1 });
  expect(split(STEP, [STEP])).toEqual({ from: 6, sent: 6, to: 9, waiting: 0, transfer: 3 });
});

test("the two parts add up to the exposed time of each recorded rank, and the recorded straggler is waited for", () => {
  const { worlds } = recorded<Timeline>("ddp_timeline");
  for (const ranks of worlds.flatMap(({ ways }) => Object.values(ways)))
    for (const rank of ranks) {
      const { waiting, transfer } = split(rank, ranks);
      expect(waiting + transfer).toBeCloseTo(exposed(rank).to - exposed(rank).from, 9);
    }
  const two = worlds[0]!.ways["no_sync until the last micro-batch"]!;
  expect(split(two[0]!, two).waiting).toBeGreaterThan(split(two[0]!, two).transfer);
  expect(split(two[1]!, two).waiting).toBe(0);
});

test("without no_sync, and with it around the backward only, gradients are sent in every micro-batch", () => {
  const { worlds, num_micro_batches: number } = recorded<Timeline>("ddp_timeline");
  for (const { ways } of worlds) {
    const sent = (way: string) => sentBytes(ways[way]![0]!);
    const right = sent("no_sync until the last micro-batch");
    expect(sent("all_reduce of anybatch")).toBe(right);
    expect(sent("reduced in every micro-batch")).toBe(number * right);
    expect(sent("no_sync around the backward only")).toBe(number * right);
  }
});

test("printed numbers are read from the output, and a missing line is an error", () => {
  const { programs } = recorded<{ programs: Record<string, { output: string }> }>("walk_ladder");
  const output = programs["08_no_sync.py"]!.output;
  const sent = (around: string) => printed(output, new RegExp(`around ${around} +(\\d+) bytes`));
  expect(["nothing", "backward", "forward and backward"].map(sent)).toEqual([288, 288, 72]);
  expect(printed(programs["07_ddp_with_sampler.py"]!.output, /padded.*error (\S+)/)).toBe(0.62);
  expect(() => sent("the moon")).toThrow(/nothing like/);
});

test("every link has three strategies for a fixed batch, and three numbers of micro-batches for a growing batch", () => {
  const all = recorded<Forecasts>("forecasts");
  for (const link of links(all)) {
    const own = all.forecasts.filter((one) => one.link === link);
    expect(own.filter((one) => one.scaling === "strong").map(nameOf)).toEqual(["all_reduce", "zero1", "fsdp"]);
    expect(own.filter((one) => one.scaling === "weak").map(nameOf)).toEqual(["1 micro-batch per step", "4 micro-batches per step", "16 micro-batches per step"]);
    for (const { rows } of own) expect(rows.map((row) => row.world_size)).toEqual(own[0]!.rows.map((row) => row.world_size));
  }
});
