/** Render the page at build time. */
import { render as renderComponent } from "svelte/server";

import App from "./App.svelte";
import { provideRecordings, requestedByPart } from "./data/recordings";
import { prepare } from "./kit/prepared";
import { parts } from "./sections";

/** The body of the page, and the recordings that its parts request; "" is the page itself. */
export async function render(recordings: Map<string, string>): Promise<{ body: string; needs: Record<string, string[]> }> {
  provideRecordings(recordings);
  await prepare(parts);
  const { body } = renderComponent(App);
  return { body, needs: requestedByPart() };
}
