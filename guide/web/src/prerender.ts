/** Renders the page while it is built. */
import { render as renderComponent } from "svelte/server";

import App from "./App.svelte";
import { hold, used } from "./data/recordings";

/** The page's body, and the names of the recordings it has to hold. */
export function render(recordings: Map<string, string>): { body: string; used: string[] } {
  hold(recordings);
  const { body } = renderComponent(App);
  return { body, used: used() };
}
