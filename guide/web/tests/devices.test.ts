import { readFileSync } from "node:fs";

import { expect, test } from "vitest";

import { stageLayout } from "../src/sections/devices/layout";
import { given, overlappedStep, ringBytes, ringSeconds } from "../src/sections/devices/overlap";
import { cut, describe as said, flightsOf, momentsOf, type DdpStep } from "../src/sections/devices/ring";
import { FORECAST, MEASURED } from "../src/sections/devices/said";
import { exposed, links, met, nameOf, printed, sentBytes, slowest, split, type Forecasts, type RankStep, type Timeline } from "../src/sections/devices/timeline";

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
    expect(own.filter((one) => one.scaling === "strong").map(nameOf)).toEqual(["DDP", "ZeRO-1", "FSDP"]);
    expect(own.filter((one) => one.scaling === "weak").map(nameOf)).toEqual(["1 micro-batch per step", "4 micro-batches per step", "16 micro-batches per step"]);
    for (const { rows } of own) expect(rows.map((row) => row.world_size)).toEqual(own[0]!.rows.map((row) => row.world_size));
  }
});

const step = recorded<DdpStep>("ddp_step");
const moments = momentsOf(step);
const sums = (vectors: readonly number[][]) => vectors[0]!.map((_, at) => vectors.reduce((sum, vector) => sum + vector[at]!, 0));

test("a broadcast gives all ranks the weights of rank 0, and one update keeps them equal", () => {
  const weights = (at: number) => moments[at]!.ranks.map((rank) => rank.weights);
  expect(new Set(weights(0).map(String)).size).toBe(step.ranks.length);
  expect(weights(1)).toEqual(step.ranks.map(() => step.ranks[0]!.initial));
  expect(new Set(weights(moments.length - 1).map(String)).size).toBe(1);
  const samples = step.ranks.length * step.num_micro_batches * step.micro_batch_size;
  expect(samples).toBe(32);
  step.ranks[0]!.updated.forEach((value, at) => expect(value).toBeCloseTo(step.ranks[0]!.broadcast[at]! - (0.5 * step.full_batch[at]!) / samples, 6));
});

test("every chunk of the ring is the sum of the gradients of the ranks marked in it", () => {
  const local = step.ranks.map(({ gradients }) => cut(gradients.at(-1), step.ranks.length));
  for (const { ranks, kind } of moments.filter(({ kind }) => kind === "reduce-scatter" || kind === "all-gather"))
    for (const { chunks } of ranks)
      chunks.forEach(({ values, ranks: isIn }, chunk) => {
        expect(values, kind).toEqual(sums(local.filter((_, rank) => isIn[rank]).map((chunked) => chunked[chunk]!)));
      });
});

test("a hop moves one chunk to the next rank, which adds it in the reduce-scatter and takes it over in the all-gather", () => {
  const first = moments.findIndex(({ kind }) => kind === "reduce-scatter");
  for (let at = first - 1; at < moments.length - 2; at += 1) {
    const flights = flightsOf(step, moments, at);
    expect(flights.map(({ from, to }) => [from, to])).toEqual([[0, 1], [1, 2], [2, 3], [3, 0]]);
    for (const { chunk, to, content } of flights) {
      const [before, after] = [at, at + 1].map((one) => moments[one]!.ranks[to]!.chunks[chunk]!);
      expect(after!.values).toEqual(moments[at + 1]!.kind === "all-gather" ? content.values : sums([before!.values, content.values]));
    }
  }
  expect(flightsOf(step, moments, 0)).toEqual([]);
  expect(flightsOf(step, moments, moments.length - 1)).toEqual([]);
});

test("the ring ends with torch's all-reduce and the gradient of the full batch, after 2 (n - 1) / n of its bytes", () => {
  const gradient = step.full_batch.length * step.item_bytes;
  for (const [at, rank] of step.ranks.entries()) {
    const { chunks, sentBytes: sent } = moments.at(-1)!.ranks[at]!;
    expect(chunks.flatMap(({ values }) => values)).toEqual(rank.all_reduce);
    expect(rank.all_reduce).toEqual(step.full_batch);
    expect(chunks.flatMap(({ ranks }) => ranks).every(Boolean)).toBe(true);
    expect(sent).toBe(ringBytes(gradient, step.ranks.length));
    expect(sent).toBe((2 * (4 - 1) * gradient) / 4);
  }
});

test("the moments of the step are described without repetition, and boxes do not overlap", () => {
  expect(new Set(moments.map(said)).size).toBe(moments.length);
  for (const width of [600, 360] as const) {
    const { boxes, box, height } = stageLayout(width);
    expect(boxes[1]!.x - boxes[0]!.x).toBeGreaterThan(box.width);
    expect(boxes[1]!.x + box.width).toBe(width);
    expect(boxes[2]!.y + box.height).toBe(height);
  }
});

test("a rank waits with a bucket until the slowest rank has sent it", () => {
  const late = { ...STEP, buckets: STEP.buckets.map((one) => ({ ...one, sent: one.sent + 1 })) };
  expect(STEP.buckets.map((one) => met(one, [STEP, late]))).toEqual([6, 7]);
  expect(late.buckets.map((one) => met(one, [STEP, late]))).toEqual([6, 7]);
});

const forecasts = recorded<Forecasts>("forecasts");
const { workload, seconds, links: byGigabits } = given(forecasts);
const setting = { ranks: 4, microBatches: 2, seconds, backwardShare: workload.backward_share, gradientBytes: workload.gradient_bytes, bucketBytes: 25 * 2 ** 20, link: byGigabits.get(10)!, slower: 0 };

test("calculated steps are those of anybatch's forecasts", () => {
  const golden = JSON.parse(readFileSync(new URL("overlap.golden.json", import.meta.url), "utf-8")) as { ranks: number; micro_batches: number; bucket: number; gigabits: number; slower: number; seconds: number }[];
  expect(golden.length).toBeGreaterThan(50);
  for (const one of golden) {
    const link = byGigabits.get(one.gigabits)!;
    const made = overlappedStep({ ...setting, ranks: one.ranks, microBatches: one.micro_batches, bucketBytes: one.bucket, link, slower: one.slower });
    expect(slowest(made) / one.seconds, JSON.stringify(one)).toBeCloseTo(1, 9);
  }
});

test("without a slower rank nobody waits, and with one the others wait as long as it takes longer", () => {
  const equal = overlappedStep(setting);
  for (const rank of equal) expect(split(rank, equal).waiting).toBe(0);
  const slowed = overlappedStep({ ...setting, slower: 0.25 });
  const waiting = slowed.map((rank) => split(rank, slowed).waiting);
  for (const one of waiting.slice(0, -1)) expect(one).toBeCloseTo(0.25 * 2 * seconds, 9);
  expect(waiting.at(-1)).toBe(0);
});

test("a faster link exposes less, one bucket for everything hides nothing, and tiny buckets pay the latency", () => {
  const exposedBy = (change: Partial<typeof setting>) => {
    const made = overlappedStep({ ...setting, ...change });
    return split(made[0]!, made).transfer;
  };
  expect(exposedBy({ link: byGigabits.get(100)! })).toBeLessThan(exposedBy({}));
  const whole = { bucketBytes: workload.gradient_bytes };
  expect(exposedBy(whole)).toBeCloseTo(ringSeconds(workload.gradient_bytes, 4, setting.link), 9);
  const slow = byGigabits.get(1)!;
  expect(exposedBy({ link: slow, bucketBytes: 2 ** 20 })).toBeGreaterThan(exposedBy({ link: slow }));
  const made = overlappedStep(setting);
  expect(sentBytes(made[0]!)).toBe(workload.gradient_bytes);
  made[0]!.buckets.slice(1).forEach((one, at) => expect(one.start).toBeGreaterThanOrEqual(made[0]!.buckets[at]!.done));
});

test("no forecast is among the measured claims", () => {
  const isForecast = (claim: string) => recorded<{ forecast?: boolean }>(`claims_${claim}`).forecast === true;
  expect(MEASURED.filter(isForecast)).toEqual([]);
  expect(FORECAST.filter(isForecast)).toEqual(FORECAST);
});
