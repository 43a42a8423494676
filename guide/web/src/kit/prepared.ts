/** Parts whose script is here already: all of them while the page is rendered, and none before it was fetched. */
import type { Component } from "svelte";

import type { Part } from "../sections";

const components = new Map<string, Component>();

/** Load parts, so that they can be rendered at once. */
export async function prepare(parts: readonly Part[]): Promise<void> {
  for (const { id, load } of parts) components.set(id, (await load()).default);
}

export function prepared(id: string): Component | undefined {
  return components.get(id);
}
