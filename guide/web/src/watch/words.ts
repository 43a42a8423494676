/** Sentences about runs. Nothing here touches the document. */
import { formatNumber } from "../math/format";
import type { Points, Run, Verdict, Axis } from "./types";

const QUIET_SECONDS = 30;

/** State of a run; an unfinished run without new lines was killed, or its step takes long. */
export function stateOf(run: Run, age: number): { word: string; kind: "good" | "bad" | "calm" | "live" } {
  if (run.read < 0.99 * run.size) return { word: `reading, ${Math.floor((100 * run.read) / run.size)}%`, kind: "live" };
  if (run.diverged) return { word: run.state === "open" ? "diverged" : `${run.state}, diverged`, kind: "bad" };
  if (run.state === "completed") return { word: "completed", kind: "good" };
  if (run.state === "failed") return { word: "failed", kind: "bad" };
  if (run.state === "stopped") return { word: "stopped", kind: "calm" };
  if (run.state === "unread") return { word: run.message ?? "nothing to read yet", kind: "calm" };
  if (age < QUIET_SECONDS) return { word: "running", kind: "live" };
  return { word: `no new line for ${formatSeconds(age)}`, kind: "bad" };
}

/** Format seconds: 42 s, 3 min, 2 h 5 min, 4 d 3 h. */
export function formatSeconds(seconds: number): string {
  if (seconds < 1e-3) return `${formatNumber(seconds * 1e6, 3)} µs`;
  if (seconds < 1) return `${formatNumber(seconds * 1e3, 3)} ms`;
  if (seconds < 90) return `${formatNumber(seconds, seconds < 10 ? 2 : 3)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) return `${minutes} min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${formatNumber(Math.floor(minutes / 1440))} d ${Math.floor((minutes % 1440) / 60)} h`;
}

/** Format a value that may be a string: NaN, Infinity. */
export function formatValue(value: number | string | null | undefined, digits = 4): string {
  return value === null || value === undefined ? "–" : formatNumber(Number(value), digits);
}

/** Compare a run with the reference, in a word or two. */
export function verdictOf(verdict: Verdict): { word: string; kind: "good" | "bad" | "calm" } {
  if (verdict.word === "reference") return { word: "reference", kind: "calm" };
  if (verdict.word === "same") return { word: verdict.difference === 0 ? "same, bit for bit" : "same", kind: "good" };
  if (verdict.word === "drifted") return { word: `drifted since step ${formatNumber(verdict.step ?? 0)}`, kind: "bad" };
  if (verdict.word === "another") return { word: verdict.reasons.length ? "other settings" : "different run", kind: "calm" };
  return { word: "no common step", kind: "calm" };
}

/** The reason for a verdict, in a sentence. */
export function reasonOf(verdict: Verdict, reference: string): string {
  if (verdict.word === "reference") return "The other runs are compared with this one.";
  const steps = `${formatNumber(verdict.num_steps)} ${verdict.num_steps === 1 ? "step" : "steps"} in common with ${reference}`;
  if (verdict.word === "unknown") return `No common step with ${reference} yet.`;
  const apart = verdict.difference === null ? "" : `, losses at most ${formatNumber(verdict.difference, 2)} apart (relative)`;
  const beyond = `; more than ${formatNumber(verdict.tolerance, 1)} counts as more than rounding`;
  return `${verdict.reasons.length ? `${verdict.reasons.join("; ")}. ` : ""}${steps}${apart}${beyond}.`;
}

/** Points along an axis as the charts take them. */
export function along(points: Points, axis: Axis): { x: number[]; y: number[] } {
  return { x: points[axis], y: points.value.map((value) => value ?? NaN) };
}
