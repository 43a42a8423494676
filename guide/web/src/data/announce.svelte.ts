/** One polite live region for the whole page: the latest sentence wins, at most one per five seconds. */
const PAUSE_MS = 5000;

export const liveRegion = $state({ text: "" });

let last = -Infinity;
let waiting: ReturnType<typeof setTimeout> | undefined;

/** Announce a text to screen readers, now or after the pause. */
export function announce(text: string): void {
  clearTimeout(waiting);
  const speak = () => {
    last = performance.now();
    liveRegion.text = text;
  };
  const rest = last + PAUSE_MS - performance.now();
  if (rest <= 0) speak();
  else waiting = setTimeout(speak, rest);
}
