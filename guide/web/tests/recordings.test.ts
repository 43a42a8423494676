import { beforeEach, expect, test, vi } from "vitest";

beforeEach(() => vi.resetModules());

test("a recording requested during pre-rendering belongs to the requesting part", async () => {
  const { hold, recording, rendering, used } = await import("../src/data/recordings");
  const text = (name: string) => JSON.stringify({ name, question: "?", made: {}, data: 1 });
  hold(new Map(["early", "late", "later"].map((name) => [name, text(name)])));
  expect(recording("early").data).toBe(1);
  rendering("planner");
  for (const name of ["later", "late", "later"]) recording(name);
  rendering("");
  expect(used()).toEqual({ "": ["early"], planner: ["late", "later"] });
});
