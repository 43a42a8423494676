/** Recordings: held by the page itself, or fetched when they are needed. */
import type { Made, Recording } from "./types";

type About = Record<string, { question: string; made: Made }>;

const held = new Map<string, Recording>();
const asked = new Set<string>();
const later = new Set<string>();
let index: About | undefined;

/** While the page is rendered beforehand: here is everything there is. */
export function hold(texts: Map<string, string>): void {
  index = {};
  for (const [name, text] of texts) {
    const recording = JSON.parse(text) as Recording;
    held.set(name, recording);
    index[name] = { question: recording.question, made: recording.made };
  }
}

/** Names of the recordings that were asked for: those the page needs before anything is fetched. */
export function used(): string[] {
  return [...asked].filter((name) => !later.has(name)).sort();
}

/** These are fetched when they are needed, although what was rendered beforehand shows them; no other part may hold them. */
export function postpone(names: readonly string[]): void {
  for (const name of names) later.add(name);
}

/** A recording that the page holds. Asking for it while the page is rendered is what makes the page hold it. */
export function recording<Data>(name: string): Recording<Data> {
  asked.add(name);
  let found = held.get(name);
  if (!found && typeof document !== "undefined") {
    found = embedded<Recording>(`rec-${name}`);
    if (found) held.set(name, found);
  }
  if (!found) throw new Error(`no recording ${name} in guide/web/recordings; \`anybatch guide record ${name}\` makes it`);
  return found as Recording<Data>;
}

/** A recording that is too large to be held from the start. In a page that is one file it is held all the same. */
export async function fetched<Data>(name: string): Promise<Recording<Data>> {
  const found = held.get(name) ?? embedded<Recording>(`rec-${name}`) ?? (await download(name));
  held.set(name, found);
  return found as Recording<Data>;
}

/** What and where a recording is, also if it is not here yet. */
export function about(name: string): { question: string; made: Made } | undefined {
  if (index === undefined) index = typeof document === "undefined" ? {} : (embedded<About>("rec-index") ?? {});
  return index[name];
}

/** Names of all recordings. */
export function names(): string[] {
  about("");
  return Object.keys(index ?? {}).sort();
}

async function download(name: string): Promise<Recording> {
  const answer = await fetch(`rec/${name}.json`);
  if (!answer.ok) throw new Error(`rec/${name}.json: ${answer.status}`);
  return (await answer.json()) as Recording;
}

function embedded<Shape>(id: string): Shape | undefined {
  const text = document.getElementById(id)?.textContent;
  return text ? (JSON.parse(text) as Shape) : undefined;
}
