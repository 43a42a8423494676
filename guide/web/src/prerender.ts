/** Render the page at build time. */
import { render as renderComponent } from "svelte/server";

import App from "./App.svelte";
import { hold, used } from "./data/recordings";
import { prepare } from "./kit/prepared";
import { parts } from "./sections";

/** The body of the page, and the recordings that its parts request; "" is the page itself. */
export async function render(recordings: Map<string, string>): Promise<{ body: string; needs: Record<string, string[]> }> {
  hold(recordings);
  await prepare(parts);
  const { body } = renderComponent(App);
  return { body, needs: used() };
}
