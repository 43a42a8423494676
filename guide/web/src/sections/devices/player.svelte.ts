/** Time that runs, stops at a moment, or is set by the reader. */
import { onDestroy } from "svelte";

export class Player {
  time = $state(0);
  playing = $state(false);
  /** Whether the reader has played or moved it. */
  touched = $state(false);
  #until = 0;
  #previous = 0;
  readonly #end: () => number;
  readonly #rate: () => number;

  /** `opening` is shown until it is touched; `rate` is the time that passes in a second. */
  constructor(opening: number, end: () => number, rate: () => number) {
    this.time = opening;
    this.#end = end;
    this.#rate = rate;
    onDestroy(() => (this.playing = false));
  }

  /** Play to the end, from the start if it is at its end or untouched; or pause. */
  toggle(): void {
    if (this.playing) {
      this.playing = false;
      return;
    }
    if (!this.touched || this.time >= this.#end()) this.time = 0;
    this.#run(this.#end());
  }

  /** Play until the next moment, or go back to the previous one. Without motion, jump to it. */
  step(moments: 1 | -1): void {
    const to = moments === 1 ? Math.floor(this.time + 1e-6) + 1 : Math.ceil(this.time - 1e-6) - 1;
    if (moments === -1 || matchMedia("(prefers-reduced-motion: reduce)").matches) this.seek(to);
    else this.#run(Math.min(this.#end(), to));
  }

  seek(time: number): void {
    this.touched = true;
    this.playing = false;
    this.time = Math.max(0, Math.min(this.#end(), time));
  }

  #run(until: number): void {
    this.touched = true;
    this.#until = until;
    if (this.playing) return;
    this.playing = true;
    this.#previous = 0;
    requestAnimationFrame((now) => this.#tick(now));
  }

  #tick(now: number): void {
    if (!this.playing) return;
    // A hidden page or a slow frame does not make it jump.
    if (this.#previous) this.time = Math.min(this.#until, this.time + Math.min(0.1, (now - this.#previous) / 1000) * this.#rate());
    this.#previous = now;
    if (this.time >= this.#until) this.playing = false;
    else requestAnimationFrame((next) => this.#tick(next));
  }
}
