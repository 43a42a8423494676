/** Holds back lines of a live run, so that its gradient visibly fills up in the first steps; later steps then catch up. */
import type { Line } from "./types";

export const HELD_STEPS = 2;
const MICRO_BATCH_MS = 300;
const MAX_STEP_MS = 2000;
/** Frames in which a backlog of steps shrinks to about a third. */
const CATCH_UP_FRAMES = 20;

export class Pace {
  #queue: Line[] = [];
  /** The latest released micro-batch. */
  #step = -1;
  #position = -1;
  /** Number of micro-batches per step. */
  #of = 1;
  /** When the next micro-batch may follow, in milliseconds. */
  #next = 0;

  get isEmpty(): boolean {
    return this.#queue.length === 0;
  }

  add(lines: readonly Line[]): void {
    this.#queue.push(...lines);
  }

  /** Release the lines up to the next micro-batch that must wait, and only a few steps per frame. */
  take(now: number): Line[] {
    let steps = Math.max(1, Math.ceil(this.#queue.filter(({ kind }) => kind === "step").length / CATCH_UP_FRAMES));
    let count = 0;
    for (const line of this.#queue) {
      if (this.#isNext(line) && this.#step < HELD_STEPS && now < this.#next) break;
      if (line.kind === "step" && (steps -= 1) < 0) break;
      this.#note(line, now);
      count += 1;
    }
    return this.#queue.splice(0, count);
  }

  /** Release the lines up to the end of the next micro-batch. */
  one(now: number): Line[] {
    let count = 0;
    let passed = false;
    for (const line of this.#queue) {
      if (this.#isNext(line) && passed) break;
      passed ||= this.#isNext(line);
      this.#note(line, now);
      count += 1;
    }
    return this.#queue.splice(0, count);
  }

  /** Release every line. */
  all(): Line[] {
    for (const line of this.#queue) this.#note(line, 0);
    return this.#queue.splice(0);
  }

  /** Whether a line belongs to a micro-batch after the latest one; the other rank, or a repeated step, need not wait. */
  #isNext(line: Line): boolean {
    if (line.kind !== "guide.micro_batch" && line.kind !== "micro_batch") return false;
    const [step, position] = [Number(line["step"]), Number(line["position"])];
    return step > this.#step || (step === this.#step && position > this.#position);
  }

  #note(line: Line, now: number): void {
    if (line.kind === "micro_batch" && line["num_micro_batches"]) this.#of = Number(line["num_micro_batches"]);
    if (!this.#isNext(line)) return;
    this.#step = Number(line["step"]);
    this.#position = Number(line["position"]);
    this.#next = now + (this.#of > 1 ? Math.min(MICRO_BATCH_MS, MAX_STEP_MS / this.#of) : 0);
  }
}
