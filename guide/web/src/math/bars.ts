/** Parts of a stacked bar, from left to right. */
import { CATEGORIES, type Category } from "../data/types";

export interface Part {
  name: Category;
  from: number;
  width: number;
}

/** Places of the parts on a bar of `width`, whose right end is `end` bytes; a hair between neighbours. */
export function stacked(bytes: Partial<Record<Category, number>>, end: number, width: number): Part[] {
  let before = 0;
  const parts: Part[] = [];
  for (const name of CATEGORIES) {
    const own = bytes[name] ?? 0;
    if (own <= 0) continue;
    parts.push({ name, from: (before / end) * width, width: Math.max(0.75, (own / end) * width - 1) });
    before += own;
  }
  return parts;
}
