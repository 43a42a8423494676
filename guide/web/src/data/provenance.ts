/** What is said of where a number is from. */
import { about } from "./recordings";
import type { From, Made } from "./types";

export const KIND_NAMES: Record<From["kind"], string> = {
  recorded: "recorded",
  live: "live",
  calculated: "calculated",
  chosen: "chosen",
  source: "cited",
  exact: "exact",
};

/** One sentence or two, for people. */
export function explain(from: From): string {
  switch (from.kind) {
    case "recorded": {
      const known = about(from.name);
      return known ? `Recorded. ${where(known.made)}` : `Recorded: ${from.name}.`;
    }
    case "live":
      return from.made ? `Computed just now. ${where(from.made)}` : "Computed just now, on this machine.";
    case "calculated":
      return `Calculated: ${from.formula}.`;
    case "chosen":
      return from.note ? `Chosen: ${from.note}.` : "A setting, chosen here.";
    case "source":
      return `Cited: ${from.note}.`;
    case "exact":
      return `Exact: ${from.note}.`;
  }
}

/** The same in a list of many: where each recording was made is told once, at the end of the page. */
export function briefly(from: From): string {
  return from.kind === "recorded" ? `Recorded as ${from.name}.` : explain(from);
}

/** Device, versions, day, commit and command of data. */
export function where(made: Made): string {
  const versions = Object.entries(made.versions).map(([name, version]) => `${name} ${version}`);
  const commit = made.commit ? `, commit ${made.commit.slice(0, 7)}` : "";
  return `${made.date}, ${deviceOf(made)}, ${versions.join(", ")}${commit}. To compute it again: ${made.command}`;
}

/** The device, as people say it: recordings were made on one thread. */
export function deviceOf(made: Made): string {
  return made.device.replace(/\b1 threads/, "one thread");
}

/** The same origins once, in the order in which they were first seen. */
export function distinct(origins: From[]): From[] {
  return [...new Map(origins.map((from) => [briefly(from), from])).values()];
}
