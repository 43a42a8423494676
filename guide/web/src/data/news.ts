/** Progress of one run. */
import type { Line } from "./types";

export interface News {
  run: string | null;
  step: number | null;
  loss: number | null;
  /** "rounds, 3 of 40" */
  progress: string;
  /** Fraction from 0 to 1, if it is known. */
  part: number | null;
}

export const NO_NEWS: News = { run: null, step: null, loss: null, progress: "", part: null };

/** The progress after these lines; a new run starts empty. */
export function newsOf(before: News, run: string, lines: readonly Line[]): News {
  const news = before.run === run ? { ...before } : { ...NO_NEWS, run };
  for (const line of lines) {
    if (line.kind === "step") {
      news.step = Number(line["step"]) + 1;
      news.loss = Number(line["loss"]);
    } else if (line.kind === "guide.progress") {
      const [done, of, what] = [Number(line["done"]), Number(line["of"]), String(line["what"] ?? "")];
      // one of one shows no progress
      news.progress = of > 1 ? `${what ? `${what}, ` : ""}${done} of ${of}` : what;
      news.part = of > 1 ? done / of : null;
    }
  }
  return news;
}
