/** Recordings: embedded in the page, or fetched on demand. */
import type { Made, Recording } from "./types";

type Needs = Record<string, string[]>;
type About = Record<string, { question: string; made: Made }>;

const loaded = new Map<string, Recording>();
/** Recordings requested during pre-rendering, by part; "" is the page itself. */
const requested = new Map<string, Set<string>>();
let currentPart = "";
let index: About | undefined;

/** For pre-rendering: provide all recordings. */
export function provideRecordings(texts: Map<string, string>): void {
  index = {};
  for (const [name, text] of texts) {
    const recording = JSON.parse(text) as Recording;
    loaded.set(name, recording);
    index[name] = { question: recording.question, made: recording.made };
  }
}

/** For pre-rendering: later requests belong to this part, or to the page itself. */
export function startPart(part: string): void {
  currentPart = part;
}

/** Names of the recordings that each part requested during pre-rendering. */
export function requestedByPart(): Needs {
  return Object.fromEntries([...requested].map(([part, names]) => [part, [...names].sort()]));
}

/** Names of the recordings that a part needs before hydration. */
export function needs(part: string): string[] {
  return embedded<Needs>("rec-needs")?.[part] ?? []; // during development, all are embedded
}

/** A loaded recording. A request during pre-rendering makes the page embed it, or the part fetch it. */
export function recording<Data>(name: string): Recording<Data> {
  requested.set(currentPart, (requested.get(currentPart) ?? new Set()).add(name));
  let found = loaded.get(name);
  if (!found && typeof document !== "undefined") {
    found = embedded<Recording>(`rec-${name}`);
    if (found) loaded.set(name, found);
  }
  if (!found) throw new Error(`no recording ${name} in guide/web/recordings; \`anybatch guide record ${name}\` makes it`);
  return found as Recording<Data>;
}

/** A recording that is too large to embed; a single-file page embeds it anyway. */
export async function fetchRecording<Data>(name: string): Promise<Recording<Data>> {
  const found = loaded.get(name) ?? embedded<Recording>(`rec-${name}`) ?? (await download(name));
  loaded.set(name, found);
  return found as Recording<Data>;
}

/** Metadata of a recording, even if it is not loaded yet. */
export function recordingMetadata(name: string): { question: string; made: Made } | undefined {
  if (index === undefined) index = typeof document === "undefined" ? {} : (embedded<About>("rec-index") ?? {});
  return index[name];
}

/** Names of all recordings. */
export function names(): string[] {
  recordingMetadata("");
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
