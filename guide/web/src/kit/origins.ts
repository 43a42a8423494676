/** A section lists where its numbers are from: each number that is shown in it is told to it. */
import { getContext, setContext } from "svelte";

import type { From } from "../data/types";

const KEY = Symbol("origins");

/** For a section: the list that fills up while its content is made. */
export function gather(): From[] {
  return setContext<From[]>(KEY, []);
}

/** For whatever shows a number. */
export function tell(from: From): void {
  getContext<From[] | undefined>(KEY)?.push(from);
}
