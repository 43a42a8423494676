/** Renders the page while it is built. */
import { render as renderComponent } from "svelte/server";

import App from "./App.svelte";
import { hold, used } from "./data/recordings";
import { prepare } from "./kit/prepared";
import { parts } from "./sections";

/** The page's body, and the recordings that its parts ask for; "" is the page itself, before any part. */
export async function render(recordings: Map<string, string>): Promise<{ body: string; needs: Record<string, string[]> }> {
  hold(recordings);
  await prepare(parts);
  const { body } = renderComponent(App);
  return { body, needs: used() };
}
