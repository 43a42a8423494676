/** Pinned runs: stored as long as the tab is open, so that they survive a reload. */
import type { Run } from "./playground";
import type { From } from "./types";

/** A run and its source. */
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
    // no storage, or it is full: pins then last until the next reload
  }
}

/** The stored pins that can be drawn. */
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
