/** Apply the state in the address once the page is hydrated; see src/data/address.ts. */
import { onMount } from "svelte";

import { parse, read, type Shape, type ValueOf } from "../data/address";

export function restoreFromAddress<S extends Shape>(section: string, shape: S, fallback: ValueOf<S>, apply: (values: ValueOf<S>) => void): void {
  onMount(() => {
    const take = () => {
      const asked = parse(location.hash);
      if (asked.section !== section || asked.values.size === 0) return;
      apply(read(shape, asked.values, fallback));
    };
    take();
    addEventListener("hashchange", take);
    return () => removeEventListener("hashchange", take);
  });
}
