/** Automatic playback, moment after moment, until the end or until the user stops it; `speed` divides the waits. */
import { onDestroy } from "svelte";

export const SPEEDS = [0.5, 1, 2, 4];

export class Playing {
  speed = $state(1);
  #timer: ReturnType<typeof setTimeout> | undefined = $state();

  constructor() {
    onDestroy(() => this.stop());
  }

  get on(): boolean {
    return this.#timer !== undefined;
  }

  stop(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
  }

  /** Stop, or start: call `step` every `wait()` milliseconds until it returns false. */
  toggle(step: () => boolean, wait: () => number): void {
    if (this.on) return this.stop();
    const go = () => {
      this.#timer = setTimeout(() => {
        if (step()) go();
        else this.stop();
      }, wait() / this.speed);
    };
    go();
  }
}
