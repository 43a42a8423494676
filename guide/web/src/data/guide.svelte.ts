/** The state of the engine. Components read it and never use a transport directly. */
import { recording as loadedRecording } from "./recordings";
import { LineFilter, Refused, transport, type Command, type Status, type ServerEvent, type Transport } from "./transport";
import type { From, Line, Order, Recording } from "./types";

interface State {
  /** False until scripts run: controls are rendered disabled. */
  ready: boolean;
  mode: "live" | "static";
  status: Status;
  /** Whether the connection was lost: the server has stopped. */
  lost: boolean;
  /** Why the latest order was refused, or the latest run failed. */
  problem: { code: string; message: string } | null;
}

const UNKNOWN: Status = { worker: "warming", run: null, paused: false };

export const guide: State = $state({
  ready: false,
  mode: "static",
  status: UNKNOWN,
  lost: false,
  problem: null,
});

type LineListener = (run: string, lines: Line[]) => void;
type ResultListener = (recording: Recording) => void;

const lineListeners = new Set<LineListener>();
const resultListeners = new Set<ResultListener>();
const lineFilter = new LineFilter();
/** Lines of the latest run, for parts that are hydrated while it runs. */
let latest: { run: string; lines: Line[] } = { run: "", lines: [] };
const results = new Map<string, Recording>();
let connection: Transport | undefined;

/** Called once, when the page is hydrated. */
export function open(): () => void {
  connection = transport();
  guide.mode = connection.mode;
  guide.ready = true;
  const listen = () => {
    if (document.hidden) connection?.close();
    else connection?.connect(handle);
  };
  listen();
  document.addEventListener("visibilitychange", listen);
  return () => {
    document.removeEventListener("visibilitychange", listen);
    connection?.close();
  };
}

/** Subscribe to the lines of every run, for the latest from its start; the result unsubscribes. */
export function onLines(listener: LineListener): () => void {
  lineListeners.add(listener);
  if (latest.lines.length) listener(latest.run, latest.lines);
  return () => lineListeners.delete(listener);
}

/** Subscribe to results of experiments. */
export function onResult(listener: ResultListener): () => void {
  resultListeners.add(listener);
  return () => resultListeners.delete(listener);
}

/** Start a run. Null if it was refused; `guide.problem` then has the reason. */
export async function start(order: Order): Promise<string | null> {
  return attempt(async () => (connection ? await connection.start(order) : null));
}

/** Pause, resume, or run one micro-batch of the current run; pass the id of a run that has just started. */
export async function command(word: Command, run: string | null = guide.status.run): Promise<void> {
  if (run) await attempt(async () => await connection?.command(run, word));
}

/** Stop the current run. */
export async function cancel(): Promise<void> {
  const run = guide.status.run;
  if (run) await attempt(async () => await connection?.cancel(run));
}

async function attempt<Answer>(ask: () => Promise<Answer>): Promise<Answer | null> {
  guide.problem = null;
  try {
    return await ask();
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    guide.problem = { code: error.code, message: error.message };
    return null;
  }
}

function handle(received: ServerEvent): void {
  guide.lost = received.event === "lost";
  switch (received.event) {
    case "status":
      guide.status = received.data;
      break;
    case "lines":
      publish(received.data.run, lineFilter.newLines(received.data.run, received.data.lines));
      break;
    case "result":
      results.set(received.data.recording.name, received.data.recording);
      for (const listener of resultListeners) listener(received.data.recording);
      break;
    case "failed":
      guide.problem = { code: received.data.code, message: received.data.message };
      break;
    case "lost":
      guide.status = UNKNOWN; // a new connection starts with the current state
      break;
    case "cancelled":
      break;
  }
}

function publish(run: string, lines: Line[]): void {
  if (!lines.length) return;
  if (run !== latest.run) latest = { run, lines: [] };
  latest.lines.push(...lines);
  for (const listener of lineListeners) listener(run, lines);
}

/** An experiment in a section: its recording, until it has run here. */
export class ExperimentView<Data> {
  readonly name: string;
  #recorded: Recording<Data>;
  #live: Recording<Data> | null = $state.raw(null);

  constructor(name: string) {
    this.name = name;
    this.#recorded = loadedRecording<Data>(name);
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
  showRecording(): void {
    this.#live = null;
  }

  get isLive(): boolean {
    return this.#live !== null;
  }
}

/** The data of a figure: `const curves = experiment<Curves>("one_batch")`, then `curves.data` and `curves.from`. */
export function experiment<Data>(name: string): ExperimentView<Data> {
  return new ExperimentView<Data>(name);
}
