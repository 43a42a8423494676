/** Recordings: embedded in the page, or fetched on demand. */
import type { Made, Recording } from "./types";

type Needs = Record<string, string[]>;
type About = Record<string, { question: string; made: Made }>;

const held = new Map<string, Recording>();
/** Recordings requested during pre-rendering, by part; "" is the page itself. */
const asked = new Map<string, Set<string>>();
let asking = "";
let index: About | undefined;

/** For pre-rendering: provide all recordings. */
export function hold(texts: Map<string, string>): void {
  index = {};
  for (const [name, text] of texts) {
    const recording = JSON.parse(text) as Recording;
    held.set(name, recording);
    index[name] = { question: recording.question, made: recording.made };
  }
}

/** For pre-rendering: later requests belong to this part, or to the page itself. */
export function rendering(part: string): void {
  asking = part;
}

/** Names of the recordings that each part requested during pre-rendering. */
export function used(): Needs {
  return Object.fromEntries([...asked].map(([part, names]) => [part, [...names].sort()]));
}

/** Names of the recordings that a part needs before hydration. */
export function needs(part: string): string[] {
  return embedded<Needs>("rec-needs")?.[part] ?? []; // during development, all are embedded
}

/** A loaded recording. A request during pre-rendering makes the page embed it, or the part fetch it. */
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

/** A recording that is too large to embed; a single-file page embeds it anyway. */
export async function fetched<Data>(name: string): Promise<Recording<Data>> {
  const found = held.get(name) ?? embedded<Recording>(`rec-${name}`) ?? (await download(name));
  held.set(name, found);
  return found as Recording<Data>;
}

/** Metadata of a recording, even if it is not loaded yet. */
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
