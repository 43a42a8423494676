/** A line trace of a program, written by guide/tracing.py, and the state at each line. */

export interface Trace {
  files: { path: string; sha256: string; text: string }[];
  lines: number[];
  /** File number of each line; empty if there is only one file. */
  file_of: number[];
  /** [index, number of unrecorded lines just before it]. */
  skipped: [number, number][];
  /** Name to its changes: [index, value after that line]. */
  values: Record<string, [number, number | null][]>;
  /** [index, characters printed after that line]. */
  printed: [number, number][];
  output: string;
}

export interface Moment {
  file: number;
  line: number;
  skipped: number;
  values: Record<string, number | null>;
  printed: string;
}

/** The state after a line. */
export function momentAt(trace: Trace, index: number): Moment {
  const values = Object.fromEntries(Object.entries(trace.values).map(([name, changes]) => [name, latest(changes, index) ?? null]));
  return {
    file: trace.file_of[index] ?? 0,
    line: trace.lines[index] ?? 0,
    skipped: trace.skipped.find(([at]) => at === index)?.[1] ?? 0,
    values,
    printed: trace.output.slice(0, latest(trace.printed, index) ?? 0),
  };
}

/** The lines of a file to show: from the function of the first executed line to the last executed line. */
export function window(trace: Trace, file: number): { first: number; lines: string[] } {
  const ran = trace.lines.filter((_, at) => (trace.file_of[at] ?? 0) === file);
  const all = (trace.files[file]?.text ?? "").trimEnd().split("\n");
  if (file === 0) return { first: 1, lines: all };
  let first = Math.min(...ran);
  while (first > 1 && !/^(def|class) /.test(all[first - 1] ?? "")) first -= 1;
  return { first, lines: all.slice(first - 1, Math.max(...ran)) };
}

function latest<Value>(changes: readonly [number, Value][], index: number): Value | undefined {
  let found: Value | undefined;
  for (const [at, value] of changes) {
    if (at > index) break;
    found = value;
  }
  return found;
}
