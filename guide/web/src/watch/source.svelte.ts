/** Where the runs come from: the server that serves the page, or the page itself where it was written into a file. */
import type { Run } from "./types";

const embedded = typeof document === "undefined" ? null : document.querySelector("#rec-watch");

class Watched {
  /** In the order in which they were named; one that was not read yet is missing. Replaced as a whole, never changed. */
  runs: (Run | undefined)[] = $state.raw([]);
  /** By run, when it was told, on the page's own clock: seconds. */
  told: number[] = $state.raw([]);
  /** Whether the stream stood, and does no more. */
  lost = $state(false);
  readonly mode: "live" | "static" = embedded ? "static" : "live";
}

export const watched = new Watched();

/** Take what the page holds, or listen; the answer ends that. */
export function open(): () => void {
  if (embedded) {
    watched.runs = (JSON.parse(embedded.textContent ?? "") as { runs: Run[] }).runs;
    watched.told = watched.runs.map(() => performance.now() / 1000);
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
    watched.told = Object.assign([...watched.told], { [at]: performance.now() / 1000 });
  });
  return () => stream.close();
}
