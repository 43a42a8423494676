/** The source of runs: the server, or data embedded in an exported page. */
import type { Run } from "./types";

const embedded = typeof document === "undefined" ? null : document.querySelector("#rec-watch");

class Watched {
  /** In the order of the command line; undefined until read. Replaced, never mutated. */
  runs: (Run | undefined)[] = $state.raw([]);
  /** Time of the last update of each run, in seconds on the page's clock. */
  updatedSeconds: number[] = $state.raw([]);
  /** Whether the connection was lost. */
  lost = $state(false);
  readonly mode: "live" | "static" = embedded ? "static" : "live";
}

export const watched = new Watched();

/** Load embedded data, or subscribe to the server; the result unsubscribes. */
export function open(): () => void {
  if (embedded) {
    watched.runs = (JSON.parse(embedded.textContent ?? "") as { runs: Run[] }).runs;
    watched.updatedSeconds = watched.runs.map(() => performance.now() / 1000);
    return () => {};
  }
  const stream = new EventSource("/api/watch");
  stream.addEventListener("open", () => (watched.lost = false));
  stream.addEventListener("error", () => (watched.lost = true));
  stream.addEventListener("close", () => {
    watched.lost = true;
    stream.close();
  });
  stream.addEventListener("runs", (event) => {
    const { num_runs } = JSON.parse(event.data as string) as { num_runs: number };
    watched.runs = Array.from({ length: num_runs }, (_, at) => watched.runs[at]);
  });
  stream.addEventListener("run", (event) => {
    const { at, run } = JSON.parse(event.data as string) as { at: number; run: Run };
    watched.runs = watched.runs.with(at, run);
    watched.updatedSeconds = Object.assign([...watched.updatedSeconds], { [at]: performance.now() / 1000 });
  });
  return () => stream.close();
}
