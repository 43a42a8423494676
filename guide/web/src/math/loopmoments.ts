/** A traced run of the usual loop, moment by moment: the phase of a line, the gradient and the weights. */
import type { Trace } from "./trace";

export const PHASES = ["ready", "load", "forward", "backward", "accumulate", "check", "update", "clear", "done"] as const;
export type Phase = (typeof PHASES)[number];

export interface VectorTrace extends Trace {
  vectors: Record<"weights" | "gradients", [number, number[] | null][]>;
}

export interface Moment {
  line: number;
  phase: Phase;
  /** Number of micro-batches in the gradient, and of updates. */
  added: number;
  /** Number of the micro-batch that is loaded, runs or was just added, from 1; 0 for none. */
  running: number;
  /** The loss of this micro-batch, once it is computed. */
  loss: number | null;
  updates: number;
  /** The gradient of this micro-batch alone, once it is computed. */
  own: number[] | null;
  gradient: number[] | null;
  weights: number[];
  /** Weights before the update, while there is one. */
  before: number[] | null;
}

/** Phase of a line of the program; the head of the loop loads a micro-batch, or ends the loop. */
export function phaseOf(text: string): Phase {
  if (text.includes(".backward(")) return "backward";
  if (text.includes("optimizer.step(")) return "update";
  if (text.includes("zero_grad(")) return "clear";
  if (text.includes("for ")) return "load";
  if (text.includes("model(inputs") || /\bloss\s*=/.test(text)) return "forward";
  return "check";
}

/** The value at a line; only changes are stored. */
function atLine<Value>(changes: readonly [number, Value][], index: number): Value | null {
  return changes.findLast(([at]) => at <= index)?.[1] ?? null;
}

/** The loss of the micro-batch that runs; null until it is computed. */
function lossAt(trace: VectorTrace, text: readonly string[], index: number): number | null {
  const began = trace.lines.slice(0, index + 1).findLastIndex((line) => text[line - 1]?.includes("model(inputs"));
  const [at, loss] = trace.values["loss"]?.findLast(([changed]) => changed <= index) ?? [-1, null];
  return at > began ? loss : null;
}

/** The executed lines between `first` and `last`, in order: the first is "ready"; a backward is two moments, compute and add. */
export function momentsOf(trace: VectorTrace, first: number, last: number): Moment[] {
  const text = (trace.files[0]?.text ?? "").split("\n");
  const { weights, gradients } = trace.vectors;
  let own: number[] | null = null;
  return trace.lines.flatMap((line, index): Moment[] => {
    if (line < first || line > last) return [];
    const written = line === first ? "ready" : phaseOf(text[line - 1] ?? "");
    const next = phaseOf(text[(trace.lines[index + 1] ?? 0) - 1] ?? "");
    const phase = written === "load" && next !== "forward" ? "done" : written;
    const [gradient, earlier] = [atLine(gradients, index), atLine(gradients, index - 1)];
    const moved = phase === "update" ? atLine(weights, index - 1) : null;
    const added = gradient === null ? 0 : (atLine(trace.values["micro_batches"] ?? [], phase === "update" ? index - 1 : index) ?? 0);
    if (phase === "load" || phase === "clear") own = null;
    const moment: Moment = {
      line,
      phase,
      added,
      running: phase === "load" || phase === "forward" ? added + 1 : phase === "backward" || phase === "check" ? added : 0,
      loss: ["forward", "backward", "check", "update"].includes(phase) ? lossAt(trace, text, index) : null,
      updates: atLine(trace.values["updates"] ?? [], index) ?? 0,
      own,
      gradient,
      weights: atLine(weights, index) ?? [],
      before: moved,
    };
    if (phase !== "backward" || gradient === null) return [moment];
    own = gradient.map((value, at) => value - (earlier?.[at] ?? 0));
    return [
      { ...moment, own, gradient: earlier, added: moment.added - 1 },
      { ...moment, own, phase: "accumulate" },
    ];
  });
}
