/** Going to a part of the page that an address names, whatever else the address says. */
import { parse } from "./address";

const FRAMES = 12;

/** Open the folds around the part, and bring it to the top. */
export function arrive(): void {
  const { section } = parse(location.hash);
  const part = section ? document.getElementById(section) : null;
  if (!part) return;
  for (let fold = part.closest("details"); fold; fold = fold.parentElement?.closest("details") ?? null) fold.open = true;
  settle(part, FRAMES);
}

/** What is above is drawn only now, and gets its true height: look again until the part stays where it is. */
function settle(part: HTMLElement, frames: number): void {
  part.scrollIntoView({ behavior: "instant" });
  if (frames > 0) requestAnimationFrame(() => settle(part, frames - 1));
}
