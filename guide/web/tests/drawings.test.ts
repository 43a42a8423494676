import { expect, test } from "vitest";

import { stepwise } from "../make/drawings.js";

test("points are told from the one before", () => {
  expect(stepwise("M1 2L3 5L4 4L6 1")).toBe("M1 2l2 3l1-1l2-3");
});

test("points between two others on a level or upright line are left out, turns and ends are not", () => {
  expect(stepwise("M0 0L1 0L2 0L2 3L2 4L5 4L1 4L1 9Z")).toBe("M0 0l2 0l0 4l3 0l-4 0l0 5Z");
});
