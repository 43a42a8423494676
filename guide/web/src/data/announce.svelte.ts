/** One polite voice for the whole page: the latest sentence wins, and none within five seconds of another. */
const PAUSE_MS = 5000;

export const voice = $state({ text: "" });

let last = -Infinity;
let waiting: ReturnType<typeof setTimeout> | undefined;

/** Say something to those who listen to the page, now or when the pause is over. */
export function announce(text: string): void {
  clearTimeout(waiting);
  const speak = () => {
    last = performance.now();
    voice.text = text;
  };
  const rest = last + PAUSE_MS - performance.now();
  if (rest <= 0) speak();
  else waiting = setTimeout(speak, rest);
}
