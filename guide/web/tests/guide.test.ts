import { beforeEach, expect, test, vi } from "vitest";

class Stream extends EventTarget {
  static latest: Stream;
  constructor(readonly address: string) {
    super();
    Stream.latest = this;
  }
  close(): void {}
  say(event: string, data: unknown): void {
    this.dispatchEvent(new MessageEvent(event, { data: JSON.stringify(data) }));
  }
}

const asked: string[] = [];

async function opened() {
  vi.resetModules();
  asked.length = 0;
  vi.stubGlobal("document", { hidden: false, addEventListener: () => {}, removeEventListener: () => {}, querySelector: () => ({ content: "live" }) });
  vi.stubGlobal("EventSource", Stream);
  vi.stubGlobal("fetch", async (address: string) => {
    asked.push(address);
    return new Response(JSON.stringify({ id: "abc" }), { status: 202 });
  });
  const module = await import("../src/data/guide.svelte");
  module.open();
  return module;
}

beforeEach(() => vi.unstubAllGlobals());

test("a run that has just started accepts a command before the stream reports it", async () => {
  const { command, guide, start } = await opened();
  const id = await start({ kind: "experiment", name: "one_batch", paused: true } as never);
  expect(guide.status.run).toBeNull();
  await command("micro", id);
  expect(asked).toEqual(["api/runs", "api/runs/abc/micro"]);
});

test("without a run, no command is sent", async () => {
  const { command } = await opened();
  await command("pause");
  expect(asked).toEqual([]);
});

test("a lost server is detected and its status cleared; a new connection restores the status", async () => {
  const { guide } = await opened();
  const running = { worker: "running", run: "abc", kind: "experiment", name: "one_batch", paused: false };
  Stream.latest.say("status", running);
  expect(guide).toMatchObject({ lost: false, status: running });
  Stream.latest.dispatchEvent(new Event("error"));
  expect(guide).toMatchObject({ lost: true, status: { worker: "warming", run: null } });
  Stream.latest.say("status", running);
  expect(guide).toMatchObject({ lost: false, status: running });
});

test("a run that exceeded its time limit is reported, until the next request", async () => {
  const { guide, start } = await opened();
  Stream.latest.say("failed", { run: "abc", code: "time", message: "It took more than 120 seconds." });
  expect(guide.problem).toEqual({ code: "time", message: "It took more than 120 seconds." });
  await start({ kind: "experiment", name: "one_batch" });
  expect(guide.problem).toBeNull();
});

test("a part hydrated during a run gets its lines from the start, and results that already arrived", async () => {
  const { onLines, ExperimentView } = await opened();
  const { provideRecordings } = await import("../src/data/recordings");
  const recording = { name: "one_batch", question: "?", made: {}, data: "recorded" };
  provideRecordings(new Map([["one_batch", JSON.stringify(recording)]]));
  const lines = [0, 1, 2].map((sequence) => ({ kind: "step", sequence }));
  Stream.latest.say("lines", { run: "old", lines: [{ kind: "step", sequence: 7 }] });
  Stream.latest.say("lines", { run: "abc", lines: lines.slice(0, 2) });
  const receivedLines: unknown[] = [];
  onLines((run, received) => receivedLines.push(run, ...received));
  Stream.latest.say("lines", { run: "abc", lines: lines.slice(2) });
  expect(receivedLines).toEqual(["abc", lines[0], lines[1], "abc", lines[2]]);
  Stream.latest.say("result", { run: "abc", recording: { ...recording, data: "live" } });
  expect(new ExperimentView("one_batch").data).toBe("live");
});
