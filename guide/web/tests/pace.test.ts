import { expect, test } from "vitest";

import { Pace } from "../src/data/pace";
import type { Line } from "../src/data/types";

/** Lines of a run: each step has its micro-batches, each with its gradient. */
function lines(steps: number, of: number): Line[] {
  return Array.from({ length: steps }, (_, step) => [
    ...Array.from({ length: of }, (_, position): Line[] => [{ kind: "micro_batch", step, position, num_micro_batches: of }, { kind: "guide.micro_batch", step, position }]).flat(),
    { kind: "step", step },
  ]).flat();
}

const begun = (released: readonly Line[]) => released.filter(({ kind }) => kind === "micro_batch").map((line) => `${line["step"]}:${line["position"]}`);
const shown = (released: readonly Line[]) => released.filter(({ kind }) => kind === "guide.micro_batch").map((line) => `${line["step"]}:${line["position"]}`);

test("each micro-batch of the first two steps is held for 0.3 s, and no line is lost or reordered", () => {
  const [pace, all] = [new Pace(), lines(40, 4)];
  pace.add(all);
  const released: Line[] = [];
  const began = new Map<string, number>();
  let frames = 0;
  for (let now = 0; !pace.isEmpty; now += 10, frames += 1) {
    const some = pace.take(now);
    for (const place of shown(some)) began.set(place, now);
    released.push(...some);
  }
  expect(released).toEqual(all);
  expect([0, 1].flatMap((step) => [0, 1, 2, 3].map((position) => began.get(`${step}:${position}`)))).toEqual([0, 300, 600, 900, 1200, 1500, 1800, 2100]);
  expect(began.get("2:0")).toBe(2400);
  const caughtUp = 10 * frames - 2400;
  expect([caughtUp > 100, caughtUp < 500]).toEqual([true, true]); // one or two steps per frame
});

test("many micro-batches share two seconds, and whole batches are not held", () => {
  const many = new Pace();
  many.add(lines(1, 64));
  let now = 0;
  for (; !many.isEmpty; now += 1) many.take(now);
  expect([now > 1900, now < 2100]).toEqual([true, true]);
  const whole = new Pace();
  whole.add(lines(3, 1));
  expect([0, 0, 0].map(() => shown(whole.take(0)))).toEqual([["0:0", "1:0"], ["2:0"], []]);
});

test("the second rank and a repeated step need not wait", () => {
  const pace = new Pace();
  const at = (step: number, position: number, rank: number): Line => ({ kind: "guide.micro_batch", step, position, rank });
  pace.add([{ kind: "micro_batch", step: 0, position: 0, num_micro_batches: 2 }, at(0, 0, 0), at(0, 0, 1), at(0, 1, 0), at(0, 0, 0), at(0, 1, 1)]);
  expect(pace.take(0)).toHaveLength(3);
  expect(pace.take(299)).toEqual([]);
  expect(pace.take(300)).toHaveLength(3);
});

test("a held run can be released by one micro-batch, or entirely", () => {
  const pace = new Pace();
  pace.add(lines(3, 2));
  expect(begun(pace.take(0))).toEqual(["0:0"]); // the next one has not begun
  expect(shown(pace.one(0))).toEqual(["0:1"]);
  expect(shown(pace.all())).toEqual(["1:0", "1:1", "2:0", "2:1"]);
  expect(pace.isEmpty).toBe(true);
});
