/** What a run has told of itself, of one run only. */
import type { Line } from "./types";

export interface News {
  run: string | null;
  step: number | null;
  loss: number | null;
  /** "rounds, 3 of 40" */
  progress: string;
  /** From 0 to 1, where it is known. */
  part: number | null;
}

export const NO_NEWS: News = { run: null, step: null, loss: null, progress: "", part: null };

/** What is known after these lines; another run begins with nothing. */
export function newsOf(before: News, run: string, lines: readonly Line[]): News {
  const news = before.run === run ? { ...before } : { ...NO_NEWS, run };
  for (const line of lines) {
    if (line.kind === "step") {
      news.step = Number(line["step"]) + 1;
      news.loss = Number(line["loss"]);
    } else if (line.kind === "guide.progress") {
      const [done, of, what] = [Number(line["done"]), Number(line["of"]), String(line["what"] ?? "")];
      // one thing out of one says nothing of how far it is
      news.progress = of > 1 ? `${what ? `${what}, ` : ""}${done} of ${of}` : what;
      news.part = of > 1 ? done / of : null;
    }
  }
  return news;
}
