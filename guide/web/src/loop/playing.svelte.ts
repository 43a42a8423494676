/** What plays by itself, moment after moment, until its end or until somebody stops it. */
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

  /** Stop, or begin: after `wait()` milliseconds each, `step` goes on, and says whether there is more. */
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
