import { beforeEach, expect, test, vi } from "vitest";

beforeEach(() => vi.resetModules());

test("a recording requested during pre-rendering belongs to the requesting part", async () => {
  const { provideRecordings, recording, startPart, requestedByPart } = await import("../src/data/recordings");
  const text = (name: string) => JSON.stringify({ name, question: "?", made: {}, data: 1 });
  provideRecordings(new Map(["early", "late", "later"].map((name) => [name, text(name)])));
  expect(recording("early").data).toBe(1);
  startPart("planner");
  for (const name of ["later", "late", "later"]) recording(name);
  startPart("");
  expect(requestedByPart()).toEqual({ "": ["early"], planner: ["late", "later"] });
});
