import { readFileSync } from "node:fs";

import { expect, test } from "vitest";

import { CAUSES, found, type Cause, type TrainerLosses, type WrongLosses } from "../src/sections/why_wrong/causes";

const read = (name: string) => JSON.parse(readFileSync(new URL(`../recordings/${name}.json`, import.meta.url), "utf-8"));
const { data } = read("wrong_losses") as { data: WrongLosses };
const { data: trainer } = read("trainer_losses") as { data: TrainerLosses };

test("each cause has a recorded number, a line, a fix and a command", () => {
  const all = found(CAUSES, data, trainer, 5);
  expect(new Set(all.map((one) => one.id)).size).toBe(CAUSES.length);
  for (const one of all) {
    expect(one.amount, one.id).toBeGreaterThan(0.01);
    expect(one.lines.length, one.id).toBeGreaterThan(0);
    expect(one.cure, one.id).not.toBe("");
    expect(one.ask, one.id).toMatch(/^anybatch (check|advise) /);
  }
});

test("numbers come from the recording, and the rate is the given one", () => {
  const amount = (id: string, rate = 5) => found(CAUSES, data, trainer, rate).find((one) => one.id === id)?.amount;
  expect(amount("batch_norm")).toBe(data.errors["batch_norm"]);
  expect(amount("no_sync_backward")).toBe(data.sent_bytes["no_sync_backward"]! / data.sent_bytes["right"]!);
  expect(amount("trainer_tail")).toBe(trainer.errors["module_ragged"]?.at(-1));
  expect(amount("rate", 4.5)).toBe(4.5);
});

test("the check of a Trainer's loss finds a mean, and nothing in a short last step", () => {
  const codes = (id: string) => found(CAUSES, data, trainer, 5).find((one) => one.id === id)?.findings.map((one) => one.code);
  expect(codes("trainer_loss")).toEqual(["loss_declaration"]);
  expect(codes("trainer_model")).toEqual(["loss_declaration"]);
  expect(codes("trainer_tail")).toEqual([]);
});

test("missing data is an error, not a number", () => {
  const cause = CAUSES[0] as Cause;
  expect(() => found([{ ...cause, error: "moon" }], data, trainer, 5)).toThrow(/nothing was recorded of moon/);
  expect(() => found([{ ...cause, loop: "moon" }], data, trainer, 5)).toThrow(/no loop moon/);
});
