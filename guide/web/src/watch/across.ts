/** Runs next to each other: metrics, differing settings, order, limits of the chart, CSV. Nothing here touches the document. */
import type { Axis, Points, Run } from "./types";
import { along } from "./words";

export type Curve = { x: number[]; y: number[] };
export type Sort = { by: string; descending: boolean };

const CURVES: Record<string, keyof Run["curves"]> = {
  loss: "loss",
  "samples per second": "speed",
  "gradient norm": "norm",
  "learning rate": "rate",
};
const OUTER = 0.02;
const MARGIN = 2;

/** Metrics that some run has: the curves, then those of evaluations and of `ab.record`. */
export function metricsOf(runs: readonly Run[]): string[] {
  const logged = Object.keys(CURVES).filter((name) => runs.some((run) => run.curves[CURVES[name]!].value.some((value) => value !== null)));
  return [...new Set(["loss", ...logged, ...runs.flatMap((run) => run.evaluations.flatMap((one) => Object.keys(one.metrics)))])];
}

/** A metric of a run along an axis; evaluations are placed by the step before them. */
export function metricOf(run: Run, metric: string, axis: Axis): Curve {
  const name = CURVES[metric];
  if (name) return along(name === "loss" ? (run.sketch ?? run.curves.loss) : run.curves[name], axis);
  const measured = run.evaluations.filter((one) => one.metrics[metric] !== undefined);
  return { x: measured.map((one) => placeOf(run.curves.loss, one.step, axis)), y: measured.map((one) => Number(one.metrics[metric])) };
}

function placeOf(points: Points, step: number, axis: Axis): number {
  if (axis === "step") return step;
  const after = points.step.findIndex((one) => one >= step);
  return points[axis].at(after < 0 ? -1 : after) ?? 0;
}

/** The last finite value of a metric. */
export function latestOf(run: Run, metric: string): number | null {
  if (metric === "loss") return run.last === null ? null : Number(run.last.loss);
  return metricOf(run, metric, "step").y.findLast(Number.isFinite) ?? null;
}

/** Exponential moving average without bias at the start; `weight` is the share of the earlier values. */
export function smoothed(values: readonly number[], weight: number): number[] {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return NaN;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** Limits of an axis that a few far values do not stretch. */
export function limitsOf(values: readonly number[]): [number, number] | null {
  const sorted = values.filter(Number.isFinite).toSorted((a, b) => a - b);
  const [least, most] = [sorted[0], sorted.at(-1)];
  if (least === undefined || most === undefined || least === most) return null;
  const low = sorted[Math.floor(OUTER * (sorted.length - 1))]!;
  const high = sorted[Math.ceil((1 - OUTER) * (sorted.length - 1))]!;
  const room = MARGIN * (high - low);
  return room === 0 ? [least, most] : [Math.max(least, low - room), Math.min(most, high + room)];
}

/** Whether a setting of two runs differs. A missing one has its default if both are runs of `anybatch train`, else it is unknown. */
export function differs(run: Run, other: Run, name: string): boolean {
  const [one, two] = [run.settings[name], other.settings[name]];
  const isKnown = (one !== undefined && two !== undefined) || ("recipe" in run.settings && "recipe" in other.settings);
  return isKnown && one !== two;
}

/** Names of the settings in which some runs differ. */
export function differing(runs: readonly Run[]): string[] {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
  return names.filter((name) => runs.some((run, at) => runs.slice(at + 1).some((other) => differs(run, other, name))));
}

/** Indices of the runs whose name, notes or settings contain each word, sorted by a column; runs without a value come last. */
export function chosenRuns(runs: readonly (Run | undefined)[], words: string, sort: Sort | null, value: (run: Run, column: string) => string | number | null): number[] {
  const sought = words.toLowerCase().split(/\s+/).filter(Boolean);
  const kept = runs.flatMap((run, at) => {
    if (!run) return sought.length ? [] : [at];
    const text = [run.name, run.title, run.note, ...Object.entries(run.settings).map(([name, one]) => `${name}=${one}`)].join(" ").toLowerCase();
    return sought.every((word) => text.includes(word)) ? [at] : [];
  });
  if (!sort) return kept;
  const key = (at: number) => (runs[at] ? value(runs[at], sort.by) : null);
  const missing = (one: string | number | null) => one === null || Number.isNaN(one);
  return kept.toSorted((a, b) => {
    const [one, other] = [key(a), key(b)];
    if (missing(one) || missing(other)) return Number(missing(one)) - Number(missing(other)) || a - b;
    const order = typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other), "en", { numeric: true });
    return (sort.descending ? -order : order) || a - b;
  });
}

/** Rows as CSV. A text that a spreadsheet would run as a formula gets an apostrophe. */
export function csvOf(rows: readonly (readonly (string | number | null)[])[]): string {
  const cell = (value: string | number | null) => {
    if (typeof value !== "string") return value === null || !Number.isFinite(value) ? "" : String(value);
    const safe = /^[=+\-@\t\r]/.test(value) && Number.isNaN(Number(value)) ? `'${value}` : value;
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  return `${rows.map((row) => row.map(cell).join(",")).join("\r\n")}\r\n`;
}

/** A small curve, 96 by 24 units; values beyond the limits end at its edge. */
export function sparkOf({ x, y }: Curve): string {
  const limits = limitsOf(y);
  const [first, last] = [x[0] ?? 0, x.at(-1) ?? 0];
  if (!limits || first === last) return "";
  let pen = "M";
  return x.flatMap((place, at) => {
    const value = y[at] ?? NaN;
    if (!Number.isFinite(value)) {
      pen = "M";
      return [];
    }
    const height = Math.min(1, Math.max(0, (value - limits[0]) / (limits[1] - limits[0])));
    const point = `${pen}${((96 * (place - first)) / (last - first)).toFixed(1)} ${(22 - 20 * height).toFixed(1)}`;
    pen = "L";
    return [point];
  }).join("");
}
