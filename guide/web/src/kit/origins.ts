/** The sources of the numbers in a section: each displayed number registers its source. */
import { getContext, setContext } from "svelte";

import type { From } from "../data/types";

const KEY = Symbol("origins");

/** For a section: the list that is filled while its content is created. */
export function gather(): From[] {
  return setContext<From[]>(KEY, []);
}

/** For components that show a number. */
export function tell(from: From): void {
  getContext<From[] | undefined>(KEY)?.push(from);
}
