/**
 * Two connections to the engine. Live: orders by POST, events by one stream (SSE) per tab.
 * Static: there is no engine, only recordings; no request is ever sent.
 */
import type { Line, Order, Recording, Setting } from "./types";

export interface Status {
  worker: "warming" | "idle" | "running" | "restarting";
  run: string | null;
  kind?: Order["kind"];
  name?: string;
  setting?: Setting;
  paused: boolean;
  /** The longest time of a run, in seconds. */
  limit?: number;
}

/** Events from the server. */
export type ServerEvent =
  | { event: "status"; data: Status }
  | { event: "lines"; data: { run: string; lines: Line[] } }
  | { event: "result"; data: { run: string; recording: Recording } }
  | { event: "failed"; data: { run: string; code: string; message: string } }
  | { event: "cancelled"; data: { run: string } }
  | { event: "lost"; data: null };

export type Listener = (event: ServerEvent) => void;
export type Command = "pause" | "resume" | "micro";

/** A refused order. `code` is the server's reason; "busy" includes the current run. */
export class Refused extends Error {
  constructor(
    readonly code: string,
    message: string,
    readonly id: string | null = null,
  ) {
    super(message);
  }
}

export interface Transport {
  readonly mode: "live" | "static";
  connect(listener: Listener): void;
  close(): void;
  /** Start a run; the result is its id. */
  start(order: Order): Promise<string>;
  command(run: string, command: Command): Promise<void>;
  cancel(run: string): Promise<void>;
}

/** The browser functions in use; a test can replace them. */
export interface Browser {
  fetch: typeof fetch;
  EventSource: new (address: string) => EventSource;
}

const EVENTS = ["status", "lines", "result", "failed", "cancelled"] as const;

export class LiveTransport implements Transport {
  readonly mode = "live";
  #browser: Browser;
  #stream: EventSource | undefined;

  constructor(browser: Browser) {
    this.#browser = browser;
  }

  connect(listener: Listener): void {
    this.close();
    const stream = new this.#browser.EventSource("api/events");
    for (const event of EVENTS) {
      stream.addEventListener(event, (message) => {
        listener({ event, data: JSON.parse((message as MessageEvent<string>).data) } as ServerEvent);
      });
    }
    // the server closes the stream, so that the browser does not reconnect forever
    stream.addEventListener("close", () => {
      stream.close();
      listener({ event: "lost", data: null });
    });
    stream.addEventListener("error", () => listener({ event: "lost", data: null }));
    this.#stream = stream;
  }

  close(): void {
    this.#stream?.close();
    this.#stream = undefined;
  }

  async start(order: Order): Promise<string> {
    const answer = (await this.#ask("POST", "api/runs", order)) as { id: string };
    return answer.id;
  }

  async command(run: string, command: Command): Promise<void> {
    await this.#ask("POST", `api/runs/${run}/${command}`, {});
  }

  async cancel(run: string): Promise<void> {
    await this.#ask("DELETE", `api/runs/${run}`);
  }

  async #ask(method: "POST" | "DELETE", address: string, body?: object): Promise<unknown> {
    const headers: Record<string, string> = { "X-Anybatch": "1", "Content-Type": "application/json" };
    let answer: Response;
    try {
      answer = await this.#browser.fetch(address, { method, headers, ...(body ? { body: JSON.stringify(body) } : {}) });
    } catch {
      throw new Refused("unreachable", "The server does not answer. Is `anybatch guide` still running?");
    }
    const reply = (await answer.json().catch(() => ({}))) as { code?: string; message?: string; id?: string };
    if (answer.ok) return reply;
    const code = reply.code ?? String(answer.status);
    const message = reply.message ?? (code === "busy" ? "Another run is in progress." : `The server answered ${answer.status}.`);
    throw new Refused(code, message, reply.id ?? null);
  }
}

export class StaticTransport implements Transport {
  readonly mode = "static";

  connect(): void {}

  close(): void {}

  start(): Promise<string> {
    return this.#refuse();
  }

  command(): Promise<void> {
    return this.#refuse();
  }

  cancel(): Promise<void> {
    return this.#refuse();
  }

  #refuse(): Promise<never> {
    return Promise.reject(new Refused("static", "This copy of the guide has no engine. Run `anybatch guide` to use one."));
  }
}

/**
 * Drops repeated lines. A page that reconnects gets the latest run from its start; lines that it already has
 * are recognised by their sequence number.
 */
export class LineFilter {
  #run = "";
  #last = -1;

  newLines(run: string, lines: Line[]): Line[] {
    if (run !== this.#run) {
      this.#run = run;
      this.#last = -1;
    }
    return lines.filter(({ sequence }) => {
      if (typeof sequence !== "number") return true;
      const isNew = sequence > this.#last;
      if (isNew) this.#last = sequence;
      return isNew;
    });
  }
}

/** The transport given in the meta element of the page. */
export function transport(): Transport {
  const word = document.querySelector<HTMLMetaElement>('meta[name="anybatch-guide"]')?.content;
  return word === "live" ? new LiveTransport({ fetch: fetch.bind(globalThis), EventSource }) : new StaticTransport();
}
