import { readFileSync } from "node:fs";

import { expect, test } from "vitest";

import { cells, gathers, stepOf, type BothOrders } from "../src/sections/devices/order";

const { data } = JSON.parse(readFileSync(new URL("../recordings/layer_order.json", import.meta.url), "utf-8")) as { data: BothOrders };

test("each visit has a cell, and a tick where weights are gathered", () => {
  for (const order of ["micro_batches", "layers"] as const) {
    const { visits } = stepOf(data.steps, order, 4);
    const drawn = [0, 1, 2, 3].map((number) => cells(visits, number, { width: 360, top: 0, row: 15, blocks: data.blocks }).split("M").length - 1);
    expect(drawn).toEqual([8, 8, 8, 8]);
    expect(gathers(visits, 360, 0).split("M").length - 1).toBe(visits.filter((visit) => visit[3]).length);
  }
});

test("the first block is at the bottom, and time runs to the right", () => {
  expect(cells([["forward", 0, 0, true], ["forward", 1, 0, true]], 0, { width: 20, top: 0, row: 10, blocks: 2 })).toBe("M0 10h9v8h-9zM10 0h9v8h-9z");
});

test("a step that was not recorded is an error", () => {
  expect(() => stepOf(data.steps, "layers", 3)).toThrow(/no step of 3/);
});
