/** Stacked layers: columns and areas, and an axis in bytes. */
import { tenth } from "./curves";
import { ticks } from "./scales";

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Round numbers of bytes within an axis, in the unit of its end. */
export function byteTicks(most: number, count: number): { unit: string; marks: { bytes: number; label: string }[] } {
  const power = most > 0 ? Math.min(UNITS.length - 1, Math.floor(Math.log2(most * 0.999) / 10)) : 0;
  const factor = 1024 ** power;
  const marks = ticks([0, most / factor], count).map((value) => ({ bytes: value * factor, label: String(value) }));
  return { unit: UNITS[power] ?? "B", marks };
}

/** Lower and upper edge of each layer at each place. */
export function stackedLayers(layers: readonly (readonly number[])[]): { low: number[]; high: number[] }[] {
  const below = (layers[0] ?? []).map(() => 0);
  return layers.map((values) => {
    const low = [...below];
    values.forEach((value, at) => (below[at] = (below[at] ?? 0) + value));
    return { low, high: [...below] };
  });
}

/** The outline of a layer: forward along its upper edge, back along its lower edge. */
export function areaPath(x: readonly number[], low: readonly number[], high: readonly number[], across: (value: number) => number, down: (value: number) => number): string {
  const there = x.map((place, at) => `${at ? "L" : "M"}${tenth(across(place))} ${tenth(down(high[at] ?? 0))}`);
  const back = x.map((place, at) => `L${tenth(across(place))} ${tenth(down(low[at] ?? 0))}`).reverse();
  return `${there.join("")}${back.join("")}Z`;
}
