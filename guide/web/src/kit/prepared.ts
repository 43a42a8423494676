/** Parts whose script is loaded: all of them during pre-rendering; in the browser, the fetched ones. */
import type { Component } from "svelte";

import type { Part } from "../sections";

const components = new Map<string, Component>();

/** Load parts, so that they can be rendered immediately. */
export async function prepare(parts: readonly Part[]): Promise<void> {
  for (const { id, load } of parts) components.set(id, (await load()).default);
}

export function prepared(id: string): Component | undefined {
  return components.get(id);
}
