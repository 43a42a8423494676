/** The sources of the numbers in a section: each displayed number registers its source. */
import { getContext, setContext } from "svelte";

import type { From } from "../data/types";

const KEY = Symbol("origins");

/** For a section: return a list; the numbers of its content add their sources to it. */
export function collectSources(): From[] {
  return setContext<From[]>(KEY, []);
}

/** For components that show a number. */
export function registerSource(from: From): void {
  getContext<From[] | undefined>(KEY)?.push(from);
}
