/** Automatic playback, moment after moment, until the end or until the user stops it. */
import { onDestroy } from "svelte";

export class Playing {
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
      }, wait());
    };
    go();
  }
}
