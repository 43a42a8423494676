import { expect, test } from "vitest";

import { LiveTransport, LineFilter, Refused, StaticTransport, type ServerEvent } from "../src/data/transport";

class Stream extends EventTarget {
  static made: Stream[] = [];
  closed = false;
  constructor(readonly address: string) {
    super();
    Stream.made.push(this);
  }
  close(): void {
    this.closed = true;
  }
  say(event: string, data: unknown): void {
    this.dispatchEvent(new MessageEvent(event, { data: JSON.stringify(data) }));
  }
}

interface Asked {
  address: string;
  init: RequestInit;
}

function browser(status: number, answer: unknown) {
  const asked: Asked[] = [];
  Stream.made = [];
  const fetch = async (address: string, init: RequestInit) => {
    asked.push({ address, init });
    return new Response(JSON.stringify(answer), { status });
  };
  return { asked, way: new LiveTransport({ fetch, EventSource: Stream } as never) };
}

test("an order is sent as JSON, with the header that a foreign page cannot send", async () => {
  const { asked, way } = browser(202, { id: "abc" });
  expect(await way.start({ kind: "experiment", name: "one_batch" })).toBe("abc");
  expect(asked[0]?.address).toBe("api/runs");
  expect(asked[0]?.init.method).toBe("POST");
  expect(asked[0]?.init.headers).toEqual({ "X-Anybatch": "1", "Content-Type": "application/json" });
  expect(JSON.parse(String(asked[0]?.init.body))).toEqual({ kind: "experiment", name: "one_batch" });
});

test("pausing, one micro-batch and stopping name the run", async () => {
  const { asked, way } = browser(200, {});
  await way.command("abc", "micro");
  await way.cancel("abc");
  expect(asked.map(({ address, init }) => `${init.method} ${address}`)).toEqual(["POST api/runs/abc/micro", "DELETE api/runs/abc"]);
});

test("a refusal has the reason, and the current run", async () => {
  const { way } = browser(409, { code: "busy", id: "abc" });
  const refused = await way.start({ kind: "experiment", name: "one_batch" }).catch((error: unknown) => error);
  expect(refused).toBeInstanceOf(Refused);
  expect(refused).toMatchObject({ code: "busy", id: "abc" });
});

test("a stopped server counts as a refusal", async () => {
  const way = new LiveTransport({ fetch: () => Promise.reject(new TypeError()), EventSource: Stream } as never);
  await expect(way.cancel("abc")).rejects.toMatchObject({ code: "unreachable" });
});

test("events are forwarded unchanged, until the server closes the stream", () => {
  const { way } = browser(200, {});
  const events: ServerEvent[] = [];
  way.connect((one) => events.push(one));
  const stream = Stream.made[0];
  stream?.say("status", { worker: "idle", run: null, paused: false });
  stream?.say("lines", { run: "abc", lines: [{ kind: "step", step: 0 }] });
  stream?.dispatchEvent(new Event("close"));
  expect(events.map((one) => one.event)).toEqual(["status", "lines", "lost"]);
  expect(stream?.closed).toBe(true);
});

test("there is one stream at a time", () => {
  const { way } = browser(200, {});
  way.connect(() => undefined);
  way.connect(() => undefined);
  expect(Stream.made.map((stream) => stream.closed)).toEqual([true, false]);
});

test("without an engine, an order is refused and no request is sent", async () => {
  await expect(new StaticTransport().start()).rejects.toMatchObject({ code: "static" });
});

test("lines that are repeated after a lost connection are forwarded once", () => {
  const filter = new LineFilter();
  const lines = [0, 1, 2].map((sequence) => ({ kind: "step", sequence }));
  expect(filter.newLines("a", lines.slice(0, 2))).toHaveLength(2);
  expect(filter.newLines("a", lines)).toEqual([lines[2]]);
  expect(filter.newLines("b", lines)).toHaveLength(3);
  expect(filter.newLines("b", [{ kind: "guide.progress" }])).toHaveLength(1);
});
