/** The state of the engine. Components read it and never use a transport directly. */
import { recording as held } from "./recordings";
import { Once, Refused, transport, type Command, type Status, type Told, type Transport } from "./transport";
import type { From, Line, Order, Recording } from "./types";

interface State {
  /** False until scripts run: controls are rendered disabled. */
  ready: boolean;
  mode: "live" | "static";
  status: Status;
  /** Whether the connection was lost: the server has stopped. */
  lost: boolean;
  /** Why the latest order was refused, or the latest run failed. */
  trouble: { code: string; message: string } | null;
}

const UNKNOWN: Status = { worker: "warming", run: null, paused: false };

export const guide: State = $state({
  ready: false,
  mode: "static",
  status: UNKNOWN,
  lost: false,
  trouble: null,
});

type LineListener = (run: string, lines: Line[]) => void;
type ResultListener = (recording: Recording) => void;

const lineListeners = new Set<LineListener>();
const resultListeners = new Set<ResultListener>();
const once = new Once();
/** Lines of the latest run, for parts that are hydrated while it runs. */
let heard: { run: string; lines: Line[] } = { run: "", lines: [] };
const results = new Map<string, Recording>();
let way: Transport | undefined;

/** Called once, when the page is hydrated. */
export function open(): () => void {
  way = transport();
  guide.mode = way.mode;
  guide.ready = true;
  const listen = () => {
    if (document.hidden) way?.close();
    else way?.connect(take);
  };
  listen();
  document.addEventListener("visibilitychange", listen);
  return () => {
    document.removeEventListener("visibilitychange", listen);
    way?.close();
  };
}

/** Subscribe to the lines of every run, for the latest from its start; the result unsubscribes. */
export function onLines(listener: LineListener): () => void {
  lineListeners.add(listener);
  if (heard.lines.length) listener(heard.run, heard.lines);
  return () => lineListeners.delete(listener);
}

/** Subscribe to results of experiments. */
export function onResult(listener: ResultListener): () => void {
  resultListeners.add(listener);
  return () => resultListeners.delete(listener);
}

/** Start a run. Null if it was refused; `guide.trouble` then has the reason. */
export async function start(order: Order): Promise<string | null> {
  return attempt(async () => (way ? await way.start(order) : null));
}

/** Pause, resume, or run one micro-batch of the current run; pass the id of a run that has just started. */
export async function command(word: Command, run: string | null = guide.status.run): Promise<void> {
  if (run) await attempt(async () => await way?.command(run, word));
}

/** Stop the current run. */
export async function cancel(): Promise<void> {
  const run = guide.status.run;
  if (run) await attempt(async () => await way?.cancel(run));
}

async function attempt<Answer>(ask: () => Promise<Answer>): Promise<Answer | null> {
  guide.trouble = null;
  try {
    return await ask();
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    guide.trouble = { code: error.code, message: error.message };
    return null;
  }
}

function take(told: Told): void {
  guide.lost = told.event === "lost";
  switch (told.event) {
    case "status":
      guide.status = told.data;
      break;
    case "lines":
      hear(told.data.run, once.unheard(told.data.run, told.data.lines));
      break;
    case "result":
      results.set(told.data.recording.name, told.data.recording);
      for (const listener of resultListeners) listener(told.data.recording);
      break;
    case "failed":
      guide.trouble = { code: told.data.code, message: told.data.message };
      break;
    case "lost":
      guide.status = UNKNOWN; // a new connection starts with the current state
      break;
    case "cancelled":
      break;
  }
}

function hear(run: string, lines: Line[]): void {
  if (!lines.length) return;
  if (run !== heard.run) heard = { run, lines: [] };
  heard.lines.push(...lines);
  for (const listener of lineListeners) listener(run, lines);
}

/** An experiment in a section: its recording, until it has run here. */
export class Shown<Data> {
  readonly name: string;
  #recorded: Recording<Data>;
  #live: Recording<Data> | null = $state.raw(null);

  constructor(name: string) {
    this.name = name;
    this.#recorded = held<Data>(name);
    this.#live = (results.get(name) as Recording<Data> | undefined) ?? null;
    if (typeof document !== "undefined") {
      onResult((result) => {
        if (result.name === name) this.#live = result as Recording<Data>;
      });
    }
  }

  get data(): Data {
    return (this.#live ?? this.#recorded).data;
  }

  get from(): From {
    return this.#live ? { kind: "live", name: this.name, made: this.#live.made } : { kind: "recorded", name: this.name };
  }

  get running(): boolean {
    return guide.status.run !== null && guide.status.kind === "experiment" && guide.status.name === this.name;
  }

  async run(): Promise<void> {
    await start({ kind: "experiment", name: this.name });
  }

  /** Go back to the recording. */
  forget(): void {
    this.#live = null;
  }

  get isLive(): boolean {
    return this.#live !== null;
  }
}

/** The data of a figure: `const curves = shown<Curves>("one_batch")`, then `curves.data` and `curves.from`. */
export function shown<Data>(name: string): Shown<Data> {
  return new Shown<Data>(name);
}
