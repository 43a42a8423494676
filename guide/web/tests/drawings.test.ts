import { expect, test } from "vitest";

import { stepwise } from "../make/drawings.js";

test("points are relative to the previous one", () => {
  expect(stepwise("M1 2L3 5L4 4L6 1")).toBe("M1 2l2 3l1-1l2-3");
});

test("inner points of horizontal or vertical lines are removed, turns and ends are kept", () => {
  expect(stepwise("M0 0L1 0L2 0L2 3L2 4L5 4L1 4L1 9Z")).toBe("M0 0l2 0l0 4l3 0l-4 0l0 5Z");
});
