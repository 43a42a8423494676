/** Runs that are pinned: kept for as long as the tab is, so that a reload loses none. */
import type { Run } from "./playground";
import type { From } from "./types";

/** A run, and where it is from. */
export interface Held {
  run: Run;
  from: From;
}

type Store = Pick<Storage, "getItem" | "setItem">;
const NAME = "anybatch-pins";

export function keepPins(pins: readonly Held[], store: Store): void {
  try {
    store.setItem(NAME, JSON.stringify(pins));
  } catch {
    // a browser that keeps nothing, or is full: pins then last until the next reload
  }
}

/** What was kept, as far as it can be drawn. */
export function keptPins(store: Store): Held[] {
  try {
    const found: unknown = JSON.parse(store.getItem(NAME) ?? "[]");
    return Array.isArray(found) ? found.filter(isHeld) : [];
  } catch {
    return [];
  }
}

function isHeld(value: unknown): value is Held {
  const { run, from } = (value ?? {}) as Partial<Held>;
  return typeof run?.setting?.task === "string" && Array.isArray(run.losses) && Array.isArray(run.relative_differences) && typeof from?.kind === "string";
}
