/** Progress of one run. */
import type { Line } from "./types";

export interface RunProgress {
  run: string | null;
  step: number | null;
  loss: number | null;
  /** "rounds, 3 of 40" */
  progress: string;
  /** Fraction from 0 to 1, if it is known. */
  part: number | null;
}

export const NO_PROGRESS: RunProgress = { run: null, step: null, loss: null, progress: "", part: null };

/** The progress after these lines; a new run starts empty. */
export function updatedProgress(before: RunProgress, run: string, lines: readonly Line[]): RunProgress {
  const next = before.run === run ? { ...before } : { ...NO_PROGRESS, run };
  for (const line of lines) {
    if (line.kind === "step") {
      next.step = Number(line["step"]) + 1;
      next.loss = Number(line["loss"]);
    } else if (line.kind === "guide.progress") {
      const [done, of, what] = [Number(line["done"]), Number(line["of"]), String(line["what"] ?? "")];
      // one of one shows no progress
      next.progress = of > 1 ? `${what ? `${what}, ` : ""}${done} of ${of}` : what;
      next.part = of > 1 ? done / of : null;
    }
  }
  return next;
}
