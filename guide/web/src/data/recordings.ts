/** Recordings: held by the page itself, or fetched when they are needed. */
import type { Made, Recording } from "./types";

type Needs = Record<string, string[]>;
type About = Record<string, { question: string; made: Made }>;

const held = new Map<string, Recording>();
/** What was asked for while the page was rendered, by the part that did; "" is what is there before any part. */
const asked = new Map<string, Set<string>>();
let asking = "";
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

/** While the page is rendered: what follows belongs to this part, or to the page itself. */
export function rendering(part: string): void {
  asking = part;
}

/** Names of the recordings that each part asked for while it was rendered. */
export function used(): Needs {
  return Object.fromEntries([...asked].map(([part, names]) => [part, [...names].sort()]));
}

/** Names of the recordings that have to be here before a part comes to life. */
export function needs(part: string): string[] {
  return embedded<Needs>("rec-needs")?.[part] ?? []; // while writing, the page holds all of them
}

/** A recording that is here. Asking for it while the page is rendered is what makes the page hold it, or the part fetch it. */
export function recording<Data>(name: string): Recording<Data> {
  asked.set(asking, (asked.get(asking) ?? new Set()).add(name));
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
