/** A log of the engine in columns, written by guide/experiments/full_loop.py, and the state at each line. */

interface Column {
  words: (string | number | null)[];
  of: number[];
}

export interface LoopLog {
  first_sequence: number;
  seconds: number[];
  kind: Column;
  name: Column;
  event: Column;
  step: Column;
  position: Column;
  numbers: [number, Numbers][];
}

export interface Numbers {
  num_samples?: number;
  counts?: Record<string, number>;
  loss_sums?: Record<string, number>;
  loss?: number;
  gradient_norm?: number;
}

export interface Strips {
  largest: number;
  rows: { step: number; after: string; position: number | null; cells: number[] }[];
}

export interface LogEvent {
  index: number;
  sequence: number;
  seconds: number;
  kind: string;
  name: string | null;
  event: string | null;
  step: number;
  position: number | null;
  numbers: Numbers;
}

export interface Span {
  lane: Lane;
  step: number;
  position: number | null;
  from: number;
  to: number;
}

export const LANES = ["load", "micro_batch", "reduce", "clip", "update"] as const;
export type Lane = (typeof LANES)[number];

/** The log line by line. */
export function eventsOf(log: LoopLog): LogEvent[] {
  const word = (column: Column, at: number) => column.words[column.of[at] ?? 0] ?? null;
  const numbers = new Map(log.numbers);
  return log.seconds.map((seconds, index) => ({
    index,
    sequence: log.first_sequence + index,
    seconds,
    kind: String(word(log.kind, index)),
    name: word(log.name, index) as string | null,
    event: word(log.event, index) as string | null,
    step: Number(word(log.step, index)),
    position: word(log.position, index) as number | null,
    numbers: numbers.get(index) ?? {},
  }));
}

/** Spans from each "begin" line to its "end" line. */
export function spansOf(events: readonly LogEvent[]): Span[] {
  const open = new Map<string, LogEvent>();
  const spans: Span[] = [];
  for (const event of events) {
    const lane = event.kind === "micro_batch" ? "micro_batch" : event.name;
    const key = `${lane} ${event.step} ${event.position}`;
    if (event.event === "begin") open.set(key, event);
    const begun = open.get(key);
    if (event.event !== "end" || !begun) continue;
    open.delete(key);
    if (LANES.includes(lane as Lane)) spans.push({ lane: lane as Lane, step: event.step, position: event.position, from: begun.seconds, to: event.seconds });
  }
  return spans;
}

export interface LogState {
  /** Micro-batches of the step whose gradient has been added. */
  added: number;
  targets: number;
  lossSum: number;
  gradientNorm: number | null;
  updates: number;
}

/** The state after a line: sums over the lines of the log. */
export function logStateAt(events: readonly LogEvent[], index: number): LogState {
  const now = events[index];
  const known: LogState = { added: 0, targets: 0, lossSum: 0, gradientNorm: null, updates: 0 };
  for (const event of events.slice(0, index + 1)) {
    if (event.kind === "phase" && event.name === "update" && event.event === "end") known.updates += 1;
    if (event.step !== now?.step) continue;
    if (event.kind === "micro_batch" && event.event === "end") {
      known.added += 1;
      known.targets += event.numbers.counts?.["loss"] ?? 0;
      known.lossSum += event.numbers.loss_sums?.["loss"] ?? 0;
    }
    if (event.kind === "step") known.gradientNorm = event.numbers.gradient_norm ?? null;
  }
  return known;
}

/** The gradient when a line is written; zeros before the first micro-batch of a step is done. */
export function stripAt(events: readonly LogEvent[], index: number, strips: Strips): number[] {
  let cells: number[] = Array.from({ length: 64 }, () => 0);
  for (const event of events.slice(0, index + 1)) {
    const after = event.kind === "micro_batch" ? "micro_batch" : (event.name ?? "");
    if (event.event !== "end") continue;
    const row = strips.rows.find((one) => one.step === event.step && one.after === after && one.position === event.position);
    if (row) cells = row.cells;
  }
  return cells;
}

/** A line of the log as a sentence. */
export function sentence({ kind, name, event, position, numbers }: LogEvent): string {
  const number = (position ?? 0) + 1;
  if (kind === "micro_batch") {
    if (event === "begin") return `micro-batch ${number}: forward begins`;
    return `micro-batch ${number}: backward ends, ${numbers.num_samples} samples, ${numbers.counts?.["loss"]} targets`;
  }
  if (kind === "step") return `step ends: loss ${numbers.loss?.toFixed(3)}, gradient norm ${numbers.gradient_norm?.toFixed(3)}`;
  if (kind === "memory") return "memory of the step is recorded";
  const words: Record<string, string> = {
    load: `load micro-batch ${number}`,
    forward_backward: "forward and backward passes",
    reduce: "reduce over ranks",
    clip: "clip the sum",
    update: "update the weights",
  };
  if (name === "load" && number > 4) return `${event === "begin" ? "request another micro-batch" : "no micro-batch left"}`;
  return `${words[name ?? ""] ?? name}: ${event === "begin" ? "begins" : "ends"}`;
}
