import { readFileSync } from "node:fs";

import { describe, expect, test } from "vitest";

import { CAUSES, follow, measured, SYMPTOMS, ways, type CauseId, type Measured, type TrainerLosses, type WrongLosses } from "../src/sections/why_wrong/causes";
import { findingsIn, readLoop } from "../src/sections/why_wrong/pasted";

const read = (name: string) => JSON.parse(readFileSync(new URL(`../recordings/${name}.json`, import.meta.url), "utf-8"));
const { data } = read("wrong_losses") as { data: WrongLosses };
const { data: trainer } = read("trainer_losses") as { data: TrainerLosses };
const ids = Object.keys(CAUSES) as CauseId[];
const of = (id: CauseId) => measured(id, data, trainer);

/** The causes below the symptom, or below one of its answers. */
function below(...chosen: number[]): CauseId[] {
  return [...new Set(ways().filter((way) => chosen.every((answer, at) => way.chosen[at] === answer)).map((way) => way.cause))];
}

describe("questions", () => {
  test("each cause is reached from a symptom with at most three questions", () => {
    expect(new Set(ways().map((way) => way.cause))).toEqual(new Set(ids));
    for (const { chosen, cause } of ways()) {
      expect(chosen.length, cause).toBeLessThanOrEqual(4); // the symptom, and three answers
      expect(follow(chosen)).toMatchObject({ cause, questions: { length: chosen.length } });
    }
  });

  test("an unfinished way has its next question, and no cause", () => {
    const { questions, cause } = follow([2]);
    expect(cause).toBeUndefined();
    expect(questions.map((each) => each.ask)).toEqual([SYMPTOMS.ask, "When do the two losses first differ?"]);
  });
});

describe("symptoms agree with the recorded losses", () => {
  const ratio = (found: Measured, step = 0) => (found.losses.with[step] ?? NaN) / (found.losses.without[step] ?? NaN);

  test("too high by a factor: a whole number in the first step, or half in the last", () => {
    expect(ratio(of("undivided"))).toBeCloseTo(4, 3);
    expect(ratio(of("trainer_loss"))).toBeCloseTo(16, 1);
    expect(of("ragged").differs).toBeGreaterThan(10);
  });

  test("a jump at the end of an epoch: equal losses before, or fewer steps", () => {
    for (const id of ["ragged", "sampler"] as const) expect(of(id).differs, id).toBe(23); // 1,437 digits are 23 batches of 64
    expect(of("drop_tail").losses.with).toHaveLength(44);
    expect(of("drop_tail").losses.without).toHaveLength(46);
  });

  test("different from the native run: in the step that the answer names", () => {
    for (const id of below(2, 0)) expect(of(id).differs, id).toBe(1);
    for (const id of below(2, 1)) expect([2, 3], id).toContain(of(id).differs);
    for (const id of below(2, 2)) expect(of(id).differs, id).toBe(23);
  });

  test("on several ranks: wrong losses, or the right ones and more bytes", () => {
    expect(of("no_sync_backward").differs).toBeUndefined();
    expect(of("no_sync_backward").amounts.map(({ amount }) => amount)).toEqual([2, 4]); // one mistake, two sizes
    for (const id of ["shares", "no_sync_always"] as const) expect(of(id).differs, id).toBeLessThanOrEqual(2);
  });

  test("NaN, or divergence: NaN once and forever, or a loss that grows", () => {
    const { with: losses, without } = of("empty").losses;
    expect(losses.map(Number.isNaN).indexOf(true)).toBe(2);
    expect(losses.slice(2).every(Number.isNaN)).toBe(true);
    expect(without.every(Number.isFinite)).toBe(true);
    const [grown, unsteady] = [of("undivided").losses, of("zero_missing").losses.with];
    expect(Math.max(...grown.with)).toBeGreaterThan(10 * Math.max(...grown.without));
    expect(Math.max(...unsteady.slice(23))).toBeGreaterThan(5 * Math.min(...unsteady.slice(0, 23)));
  });
});

test("each cause has recorded amounts and losses, marked lines, and a command without files of the guide", () => {
  for (const id of ids) {
    const cause = of(id);
    expect(cause.amounts.every(({ amount }) => id === "empty" || amount > 0.01), id).toBe(true);
    expect(cause.losses.with.length, id).toBeGreaterThan(0);
    expect(cause.wrong.split("\n").some((line) => line.startsWith("▸")), id).toBe(true);
    expect(cause.fix.split("\n").some((line) => line.startsWith("▸")), id).toBe(true);
    expect(cause.check ?? "", id).not.toContain("guide/");
  }
});

test("no_sync: the line that fixes one cause is not marked wrong in the other", () => {
  const marked = (text: string) => text.split("\n").filter((line) => line.startsWith("▸")).join("\n");
  expect(marked(CAUSES.no_sync_always.fix)).toContain("nullcontext()");
  expect(marked(CAUSES.no_sync_backward.wrong)).not.toContain("no_sync");
});

test("missing data is an error, not a number", () => {
  expect(() => measured("masked", { ...data, mistakes: {} }, trainer)).toThrow(/nothing was recorded of masked/);
});

describe("a pasted loop", () => {
  const loop = (head: string, body = "loss.backward()\n    optimizer.step()") => readLoop(`${head}\n    ${body}\n`, "train.py", data.roles);

  test("the example gives its command, and the judge’s output marks its lines", () => {
    const { source, output } = data.example;
    expect(readLoop(source, "train.py", data.roles)).toMatchObject({ missing: [], command: "anybatch check --loop train.py:train" });
    const findings = findingsIn(output);
    expect(findings.map(({ text }) => text.split(" ")[0])).toEqual(["tail_carried"]);
    for (const { lines, text } of findings) {
      expect(source.split("\n")[(lines[0] ?? 0) - 1]).toContain("optimizer.step()");
      expect(text).toMatch(/found .+; expected /);
    }
  });

  test("the judge’s roles are found, and optional parameters are left alone", () => {
    const { roles, command } = loop("def fit(net: nn.Module, train_loader, opt, *, sched=None, grad_accum: int = 4, verbose=True, **rest):");
    expect(roles).toEqual([["net", "model"], ["train_loader", "loader"], ["opt", "optimizer"], ["sched", "scheduler"], ["grad_accum", "accumulation_steps"]]);
    expect(command).toBe("anybatch check --loop train.py:fit");
  });

  test("of several functions, the one that the judge can run is named", () => {
    const text = "def update(model, batch):\n    loss.backward()\n\ndef train(model, loader, opt):\n    update(model, b)\n    opt.step()\n\ndef main():\n    train(1, 2, 3)\n";
    expect(readLoop(text, "src/run.py", data.roles).command).toBe("anybatch check --loop src/run.py:train");
  });

  test.each([
    ["for inputs, targets in loader:\n    loss.backward()\n    optimizer.step()", "a function"],
    ["class Trainer:\n    def train(self, model, loader):\n        loss.backward()\n        opt.step()", "a function at the left margin"],
    ["def train(model, loader, tokenizer):\n    loss.backward()\n    opt.step()", "the parameter tokenizer"],
    ["def train(loader):\n    loss.backward()\n    opt.step()", "a parameter model"],
    ["def train(model):\n    loss.backward()\n    opt.step()", "a parameter loader or dataset"],
    ["def train(model, loader):\n    opt.step()  # loss.backward()", "loss.backward()"],
    ["def train(model, loader):\n    loss.backward()", "optimizer.step()"],
    ["def train(model, loader):\n    loss.backward()\n    opt.step()\n\ntrain(net, data)", "__main__"],
  ])("what is missing is named: %s", (text, word) => {
    const { missing, command } = readLoop(text, "train.py", data.roles);
    expect(missing.join("\n")).toContain(word);
    expect(command).toBeUndefined();
  });

  test("a file name that would not be a path of a Python file gives no command", () => {
    expect(readLoop(data.example.source, "train.py; rm x", data.roles).command).toBeUndefined();
  });

  test("a dataset that is iterated must be called loader", () => {
    const named = (each: string) => loop("def train(model, data, opt):", `for step, batch in ${each}:\n        loss.backward()\n        opt.step()`);
    for (const each of ["data", "enumerate(data)", "enumerate(data, 1)"]) expect(named(each).missing.join(), each).toContain("the name loader for data");
    expect(named("enumerate(DataLoader(data))").missing).toEqual([]);
  });

  test("a path with a space is quoted", () => {
    expect(readLoop(data.example.source, "my dir/loop.py", data.roles).command).toBe('anybatch check --loop "my dir/loop.py:train"');
  });

  test("a Trainer's file gets the line that makes it exact; a loop next to it is still read", () => {
    const text = "from transformers import Trainer\n\nmine = Trainer(model=model, args=args)\nmine.train()\n";
    const found = readLoop(text, "train.py", data.roles);
    expect(found).toMatchObject({ missing: [], command: undefined, exact: "import anybatch as ab\n\nmine = ab.exact(mine)\nmine.train()" });
    expect(readLoop("def main():\n    trl.SFTTrainer(model, args).train()\n", "train.py", data.roles).exact).toContain("trainer = ab.exact(trainer)");
    expect(readLoop("class MyTrainer(Trainer):\n    pass\n", "train.py", data.roles).exact).toBeUndefined();
    const own = "def train(model, loader, optimizer, accumulation_steps):\n    loss.backward()\n    optimizer.step()\n";
    expect(readLoop(`${text}${own}`, "train.py", data.roles).exact).toBeUndefined();
  });
});
