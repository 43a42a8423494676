import { readFileSync } from "node:fs";

import { describe, expect, it } from "vitest";

import { MemoryTimeline, homesOf, MIB, nameOf, type SceneData } from "../src/scene/data";
import { homeOf, layoutOf, seatOf } from "../src/scene/layout";
import { pictureAt, type Picture } from "../src/scene/state";
import { storyOf, type Story } from "../src/scene/story";

const { data } = JSON.parse(readFileSync(new URL("../recordings/scene.json", import.meta.url), "utf-8")) as { data: SceneData };
const LIMITS = [1.4, 1.8, 2.5, 2.9, 4.4];
const stories = data.splits.flatMap((split) => LIMITS.map((limit) => storyOf(data, split, limit * MIB)));
const usual = storyOf(data, data.splits[2]!, 2.5 * MIB);
const moments = (story: Story, count = 60) => Array.from({ length: count + 1 }, (_, at) => (story.end * at) / count);
const numbers = (value: unknown): number[] =>
  typeof value === "number" ? [value] : value && typeof value === "object" ? Object.values(value).flatMap(numbers) : [];
const clipOf = (story: Story, kind: string) => story.clips.find((clip) => clip.kind === kind)!;

describe("the recording", () => {
  it("has the recorded peak as its largest total, for each split", () => {
    for (const split of data.splits) {
      const timeline = new MemoryTimeline(split, data.state, Infinity);
      expect(Math.abs(Math.max(...timeline.totals) - split.peak) / split.peak).toBeLessThan(0.005); // pieces below 1 KiB are left out
      expect(timeline.totals.at(-1)).toBe(data.state[0] + data.state[1]);
    }
  });

  it("has sums that end at the unsplit gradient, and the same losses", () => {
    for (const split of data.splits) {
      split.sums.forEach((sums, step) => sums.at(-1)!.forEach((value, at) => expect(value).toBeCloseTo(data.gradients[step]![at]!, 0)));
      expect(split.losses).toEqual(data.losses);
    }
  });
});

describe("the scene", () => {
  it.each(stories.map((story) => [nameOf(story.split.sizes), story.limit / MIB, story] as const))("%s with a limit of %f MiB has only finite numbers, and ends", (_, __, story) => {
    for (const time of moments(story)) expect(numbers(pictureAt(story, time)).every(Number.isFinite)).toBe(true); // one expect a picture: a million are slow
    const last = pictureAt(story, story.end);
    const fits = story.split.peak <= story.limit;
    expect(last.clip.kind).toBe(fits ? "rest" : "stop");
    expect(last.updates).toBe(fits ? 3 : 0);
    expect(last.isBad).toBe(!fits);
  });

  it("never holds more than its limit", () => {
    for (const story of stories)
      for (const { clip, memory } of moments(story, 40).map((time) => pictureAt(story, time))) if (clip.kind !== "rest") expect(memory.total).toBeLessThanOrEqual(story.limit * 1.001);
  });

  it("shows the same picture at a moment, in whatever order", () => {
    const forwards = moments(usual, 20).map((time) => pictureAt(usual, time));
    const backwards = moments(usual, 20).reverse().map((time) => pictureAt(usual, time)).reverse();
    expect(backwards).toEqual(forwards);
  });

  it("does not jump: from frame to frame, no digit and no bar moves far, except where a clip begins anew", () => {
    let before: Picture | undefined;
    for (let time = 0; time < usual.end; time += 1 / 30) {
      const now = pictureAt(usual, time);
      if (before && before.clip === now.clip) {
        const { digits } = before;
        expect(Math.max(...now.digits.map((digit, at) => Math.abs(digit.away - digits[at]!.away)))).toBeLessThan(0.75);
        expect(Math.abs(now.memory.total - before.memory.total)).toBeLessThan(0.6 * MIB);
      }
      before = now;
    }
  });

  it("fills the gradient's bar with the samples of each micro-batch, evenly or not", () => {
    for (const split of data.splits.slice(1)) {
      const story = storyOf(data, split, 4.4 * MIB);
      let summed = 0;
      for (const clip of story.clips.filter(({ kind, step }) => kind === "accumulate" && step === 0)) {
        summed += split.sizes[clip.part]!;
        expect(pictureAt(story, clip.to - 1e-6).summed).toBeCloseTo(summed, 3);
      }
      expect(summed).toBe(64);
    }
  });

  it("runs out of memory where the recorded total passes the limit, and says what would fit", () => {
    expect(pictureAt(usual, clipOf(usual, "refuse").to - 0.1)).toMatchObject({ heading: "Out of memory", detail: "The whole step needs 4.08 MiB. The limit is 2.5.", line: 2, isBad: true });
    const halves = storyOf(data, data.splits[1]!, 2.5 * MIB);
    expect(pictureAt(halves, halves.end)).toMatchObject({ heading: "Still out of memory", detail: "Choose smaller micro-batches, or raise the limit." });
    const roomy = storyOf(data, data.splits[2]!, 4.2 * MIB);
    expect(pictureAt(roomy, clipOf(roomy, "fits").to - 0.1).heading).toBe("All 64 fit");
  });
});

describe("the places of digits", () => {
  it("give each sample its own place, in blocks of its micro-batch", () => {
    for (const { sizes } of data.splits) {
      const { homes } = homesOf(sizes);
      expect(new Set(homes.map(({ column, row }) => 8 * row + column)).size).toBe(64);
      sizes.forEach((size, part) => expect(homes.filter((home) => home.part === part).length).toBe(size));
    }
  });

  it.each([327, 500, 800, 1000])("are within a stage of %i pixels, and within the GPU", (width) => {
    for (const { sizes } of data.splits) {
      const L = layoutOf(width, 2.5 * MIB);
      const { homes, gaps } = homesOf(sizes);
      for (const home of homes) {
        const [x, y] = homeOf(L, home, gaps, 1);
        expect(x - L.grid.cell / 2).toBeGreaterThan(-1);
        expect(y + L.grid.cell / 2).toBeLessThan(L.H);
      }
      for (let seat = 0; seat < sizes[0]!; seat++) {
        const [x, y, size] = seatOf(L, seat, sizes[0]!);
        expect(Math.abs(x - L.tray.x) + size / 2).toBeLessThan(L.tray.size / 2 + 2);
        expect(Math.abs(y - L.tray.y) + size / 2).toBeLessThan(L.tray.size / 2 + 2);
      }
    }
  });
});

it("has no negative size while the page is not drawn and the figure has no width", () => {
  const sizes = (value: unknown): number[] =>
    value && typeof value === "object" ? Object.entries(value).flatMap(([name, one]) => (typeof one === "number" ? (["w", "h", "size"].includes(name) ? [one] : []) : sizes(one))) : [];
  for (const limit of LIMITS) expect(Math.min(...sizes(layoutOf(0, limit * MIB)))).toBeGreaterThanOrEqual(0);
});
