import { beforeEach, expect, test, vi } from "vitest";

beforeEach(() => vi.resetModules());

test("the page holds what was asked for, but not what is fetched later", async () => {
  const { hold, postpone, recording, used } = await import("../src/data/recordings");
  const text = (name: string) => JSON.stringify({ name, question: "?", made: {}, data: 1 });
  hold(new Map(["early", "late"].map((name) => [name, text(name)])));
  postpone(["late"]);
  expect(recording("late").data).toBe(1);
  expect(recording("early").data).toBe(1);
  expect(used()).toEqual(["early"]);
});
