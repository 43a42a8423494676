import { readFileSync } from "node:fs";

import { describe, expect, it } from "vitest";

import { eventsOf, logStateAt, spansOf, stripAt } from "../src/math/looplog";
import { coloured } from "../src/math/python";
import { bars, blocks } from "../src/math/strips";
import { momentAt, type Trace, window as shownLines } from "../src/math/trace";

const recorded = (name: string) => JSON.parse(readFileSync(new URL(`../recordings/${name}.json`, import.meta.url), "utf8")).data;

describe("a strip", () => {
  it("has bars up for positive values, down for negative ones, none for zero, and none longer than its box", () => {
    expect(bars([1, -1, 0, 5], 1, 40, 20)).toBe("M1.4 10h7.2v-8h-7.2zM11.4 10h7.2v8h-7.2zM31.4 10h7.2v-8h-7.2z");
  });
});

describe("blocks", () => {
  it("have a cell for each sample, in lanes of ranks", () => {
    const drawn = blocks([31, 1], 2, 5, 4, 30, 5);
    expect(drawn.map((block) => block.path.split("z").length - 1)).toEqual([31, 1, 31, 1]);
    expect(drawn.map((block) => block.rank)).toEqual([0, 0, 1, 1]);
    expect(drawn.map((block) => block.unit)).toEqual([0, 1, 2, 3]);
  });
});

describe("a trace", () => {
  const trace: Trace = {
    files: [{ path: "a.py", sha256: "", text: "x = 0\nx += 1\n" }],
    lines: [1, 2, 2],
    file_of: [],
    skipped: [[2, 7]],
    values: { updates: [[0, 0], [2, 1]], loss: [[0, null], [1, 0.5]] },
    printed: [[1, 2]],
    output: "hi",
  };

  it("has the values of the variables after each line", () => {
    expect(momentAt(trace, 0)).toEqual({ file: 0, line: 1, skipped: 0, values: { updates: 0, loss: null }, printed: "" });
    expect(momentAt(trace, 2)).toEqual({ file: 0, line: 2, skipped: 7, values: { updates: 1, loss: 0.5 }, printed: "hi" });
  });

  it("points at lines that the recorded files have", () => {
    for (const name of ["walk_plain", "walk_ddp", "walk_anybatch"]) {
      const found = recorded(name) as Trace;
      found.lines.forEach((line, at) => {
        const { first, lines } = shownLines(found, found.file_of[at] ?? 0);
        expect(lines[line - first]?.trim(), `${name} line ${line}`).toBeTruthy();
      });
    }
  });
});

describe("a program", () => {
  it("is highlighted without losing a character", () => {
    for (const file of recorded("walk_anybatch").files as Trace["files"]) {
      const lines = file.text.split("\n");
      expect(coloured(lines).map((words) => words.map((word) => word.text).join(""))).toEqual(lines);
    }
  });

  it("has tokens with kinds", () => {
    expect(coloured(['for x in f(1):  # "all"'])[0]?.filter((word) => word.kind)).toEqual([
      { kind: "keyword", text: "for" },
      { kind: "keyword", text: "in" },
      { kind: "function", text: "f" },
      { kind: "constant", text: "1" },
      { kind: "comment", text: '# "all"' },
    ]);
  });
});

describe("a log", () => {
  const data = recorded("full_loop");
  const events = eventsOf(data.log);

  it("adds up to the values in its step line", () => {
    for (const event of events.filter((one) => one.kind === "step")) {
      const known = logStateAt(events, event.index);
      expect(known.added).toBe(4);
      expect(known.targets).toBe(event.numbers.counts?.["loss"]);
      expect(known.lossSum / known.targets).toBeCloseTo(event.numbers.loss ?? Number.NaN, 5);
    }
  });

  it("has for each step four micro-batches, and a reduction, a clipping and an update after them", () => {
    const spans = spansOf(events);
    const lanes = spans.filter((span) => span.step === data.first_step && span.lane !== "load").map((span) => span.lane);
    expect(lanes).toEqual(["micro_batch", "micro_batch", "micro_batch", "micro_batch", "reduce", "clip", "update"]);
    expect(spans.every((span) => span.to >= span.from)).toBe(true);
  });

  it("has a gradient before the update and none after it", () => {
    const update = events.findIndex((event) => event.name === "update" && event.event === "end");
    expect(stripAt(events, update - 1, data.strips).some((cell) => cell !== 0)).toBe(true);
    expect(stripAt(events, update, data.strips).every((cell) => cell === 0)).toBe(true);
    expect(stripAt(events, 0, data.strips).every((cell) => cell === 0)).toBe(true);
  });
});
