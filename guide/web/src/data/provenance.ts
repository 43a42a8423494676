/** Descriptions of sources. */
import { recordingMetadata } from "./recordings";
import type { From, Made } from "./types";

export const KIND_NAMES: Record<From["kind"], string> = {
  recorded: "recorded",
  live: "live",
  calculated: "calculated",
  forecast: "forecast",
  chosen: "chosen",
  source: "cited",
  exact: "exact",
};

/** Describe a source in one or two sentences. */
export function explain(from: From): string {
  switch (from.kind) {
    case "recorded": {
      const known = recordingMetadata(from.name);
      return known ? `Recorded. ${describeProvenance(known.made)}` : `Recorded: ${from.name}.`;
    }
    case "live":
      return from.made ? `Computed just now. ${describeProvenance(from.made)}` : "Computed just now, on this machine.";
    case "calculated":
      return `Calculated: ${from.formula}.`;
    case "forecast": {
      const made = from.made ?? recordingMetadata(from.name)?.made;
      return `Forecast from step times, bandwidth and latency, not measured.${made ? ` Computed ${describeProvenance(made)}` : ""}`;
    }
    case "chosen":
      return from.note ? `Chosen: ${from.note}.` : "A setting, chosen here.";
    case "source":
      return `Cited: ${from.note}.`;
    case "exact":
      return `Exact: ${from.note}.`;
  }
}

/** Device, versions, day, commit and command of data. */
export function describeProvenance(made: Made): string {
  const versions = Object.entries(made.versions).map(([name, version]) => `${name} ${version}`);
  const commit = made.commit ? `, commit ${made.commit.slice(0, 7)}` : "";
  return `${made.date}, ${deviceOf(made)}, ${versions.join(", ")}${commit}. To reproduce it: ${made.command}`;
}

/** The device, with "one thread" spelled out. */
export function deviceOf(made: Made): string {
  return made.device.replace(/\b1 threads/, "one thread");
}

/** Sources without duplicates, in order of first use. */
export function withoutDuplicates(origins: From[]): From[] {
  return [...new Map(origins.map((from) => [explain(from), from])).values()];
}
