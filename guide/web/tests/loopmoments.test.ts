import { readFileSync } from "node:fs";

import { expect, test } from "vitest";

import { momentsOf, phaseOf, type VectorTrace } from "../src/math/loopmoments";

const { data: trace } = JSON.parse(readFileSync(new URL("../recordings/walk_accumulation.json", import.meta.url), "utf-8")) as { data: VectorTrace };
const text = (trace.files[0]?.text ?? "").split("\n");
const first = text.findIndex((line) => line.includes("accumulation_steps = ")) + 1;
const last = text.findIndex((line) => line.startsWith("def main")) - 2;
const moments = momentsOf(trace, first, last);

test("a line is one phase, and a backward is two", () => {
  expect(["        outputs = model(inputs)", "loss = loss / accumulation_steps", "loss.backward()", "optimizer.step()", "optimizer.zero_grad()", "if (i + 1) % accumulation_steps == 0:", "for i in loader:"].map(phaseOf)).toEqual([
    ...["forward", "forward", "backward", "update", "clear", "check", "load"],
  ]);
  const phases = moments.map(({ phase }) => phase);
  expect(phases.filter((phase) => phase === "backward")).toHaveLength(8);
  expect(phases.filter((phase) => phase === "accumulate")).toHaveLength(8);
  expect(phases.filter((phase) => phase === "update")).toHaveLength(2);
});

test("p.grad grows by the gradient of the micro-batch, and exists before the addition", () => {
  let sum = trace.vectors.weights.find(([, numbers]) => numbers)?.[1]?.map(() => 0) ?? [];
  for (const moment of moments) {
    if (moment.phase === "clear") sum = sum.map(() => 0);
    if (moment.phase === "backward") expect(moment.gradient ?? sum.map(() => 0)).toEqual(sum);
    if (moment.phase !== "accumulate") continue;
    moment.own?.forEach((value, at) => expect((sum[at] ?? 0) + value).toBeCloseTo(moment.gradient?.[at] ?? Number.NaN, 12));
    sum = moment.gradient ?? [];
  }
});

test("the weights move only at the update, by the gradient times the rate of 1", () => {
  let weights = moments[0]?.weights ?? [];
  for (const moment of moments) {
    if (moment.phase === "update") {
      moment.weights.forEach((value, at) => expect(Math.abs((weights[at] ?? 0) - (moment.gradient?.[at] ?? 0) - value)).toBeLessThan(1e-3));
      expect(moment.before).toEqual(weights);
    } else expect(moment.weights).toEqual(weights);
    weights = moment.weights;
  }
});

test("four are in the sum when it is used", () => {
  expect(moments.filter(({ phase }) => phase === "update").map(({ added, updates }) => [added, updates])).toEqual([[4, 1], [4, 2]]);
});

test("it begins ready, with nothing added, and knows which micro-batch runs", () => {
  expect(moments[0]).toMatchObject({ phase: "ready", added: 0, updates: 0, running: 0, loss: null });
  expect(moments.filter(({ phase }) => phase === "ready")).toHaveLength(1);
  const running = moments.filter(({ running }) => running).map(({ running }) => running);
  expect([...new Set(running.slice(0, running.length / 2))]).toEqual([1, 2, 3, 4]);
  for (const { phase, running, added } of moments) {
    if (phase === "load" || phase === "forward" || phase === "backward") expect(running).toBe(added + 1);
    else expect(running).toBe(phase === "accumulate" || phase === "check" ? added : 0);
  }
});

test("the loss belongs to the micro-batch that runs, divided by four after its line", () => {
  const forwards = moments.filter(({ phase }) => phase === "forward");
  for (let at = 0; at < forwards.length; at += 3) {
    const [network, mean, divided] = forwards.slice(at, at + 3).map(({ loss }) => loss);
    expect(network).toBeNull();
    expect(divided).toBeCloseTo((mean ?? Number.NaN) / 4, 5);
  }
});

test("the head of the loop takes each micro-batch, and ends after the last", () => {
  const heads = moments.filter(({ phase }) => phase === "load" || phase === "done").map(({ phase, running }) => [phase, running]);
  expect(heads).toEqual([...[1, 2, 3, 4, 1, 2, 3, 4].map((number) => ["load", number]), ["done", 0]]);
});

test("the check follows each addition, keeps loss and gradient, and knows whether four are added", () => {
  const checks = moments.flatMap(({ phase, added, loss, own }, at) => (phase === "check" ? [[added, loss === moments[at - 1]?.loss && loss !== null, own === moments[at - 1]?.own && own !== null, moments[at + 1]?.phase]] : []));
  expect(checks).toEqual([1, 2, 3, 4, 1, 2, 3, 4].map((added) => [added, true, true, added === 4 ? "update" : "load"]));
});
