/** Scroll to the part of the page in an address. */
import { parse } from "./address";

const FRAMES = 12;

/** Open the folds around the part, and bring it to the top. */
export function scrollToAddress(): void {
  const { section } = parse(location.hash);
  const part = section ? document.getElementById(section) : null;
  if (!part) return;
  for (let fold = part.closest("details"); fold; fold = fold.parentElement?.closest("details") ?? null) fold.open = true;
  keepInView(part, FRAMES);
}

/** Parts above are drawn only now and get their true height: repeat until the part stays in place. */
function keepInView(part: HTMLElement, frames: number): void {
  part.scrollIntoView({ behavior: "instant" });
  if (frames > 0) requestAnimationFrame(() => keepInView(part, frames - 1));
}
