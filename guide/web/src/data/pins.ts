/** Pinned runs: stored as long as the tab is open, so that they survive a reload. */
import type { Run } from "./runs";
import type { From } from "./types";

/** A run and its source. */
export interface PinnedRun {
  run: Run;
  from: From;
}

type Store = Pick<Storage, "getItem" | "setItem">;
const NAME = "anybatch-pins";

export function storePins(pins: readonly PinnedRun[], store: Store): void {
  try {
    store.setItem(NAME, JSON.stringify(pins));
  } catch {
    // no storage, or it is full: pins then last until the next reload
  }
}

/** The stored pins that can be drawn. */
export function storedPins(store: Store): PinnedRun[] {
  try {
    const found: unknown = JSON.parse(store.getItem(NAME) ?? "[]");
    return Array.isArray(found) ? found.filter(isPinnedRun) : [];
  } catch {
    return [];
  }
}

function isPinnedRun(value: unknown): value is PinnedRun {
  const { run, from } = (value ?? {}) as Partial<PinnedRun>;
  return typeof run?.setting?.task === "string" && Array.isArray(run.losses) && Array.isArray(run.relative_differences) && Array.isArray(run.native_losses) && Array.isArray(run.accuracies) && typeof from?.kind === "string";
}
