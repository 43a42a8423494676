/** Numbers as people read them, the same on every machine. */

const SUPERSCRIPTS: Record<string, string> = { "-": "⁻", "0": "⁰", "1": "¹", "2": "²", "3": "³", "4": "⁴", "5": "⁵", "6": "⁶", "7": "⁷", "8": "⁸", "9": "⁹" };
const TIMES = " × "; // non-breaking, so that a number is not split over two lines
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** 12,345 · 0.0123 · 2.2 × 10⁻⁷: significant digits, all those of a whole number unless some are asked for. */
export function formatNumber(value: number, digits?: number): string {
  if (Number.isNaN(value)) return "not a number";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  if (Number.isInteger(value) && digits === undefined && Math.abs(value) < 1e15) return grouped(value.toFixed(0));
  const significant = digits ?? 3;
  const exponent = Number(value.toExponential(significant - 1).split("e")[1]);
  if (exponent < -4 || exponent >= 9) {
    const [mantissa = "1"] = value.toExponential(significant - 1).split("e");
    return `${minus(mantissa)}${TIMES}10${superscript(exponent)}`;
  }
  const rounded = Number(value.toPrecision(significant));
  return grouped(rounded.toFixed(Math.max(0, significant - 1 - exponent)));
}

/** Bytes in binary units: 1.5 GiB. */
export function formatBytes(bytes: number, digits = 3): string {
  const power = bytes > 0 ? Math.min(UNITS.length - 1, Math.floor(Math.log2(bytes) / 10)) : 0;
  return `${power === 0 ? grouped(String(Math.round(bytes))) : trimmed(formatNumber(bytes / 1024 ** power, digits))} ${UNITS[power]}`;
}

/** A time in milliseconds: 268 ms. */
export function formatMilliseconds(seconds: number): string {
  return `${formatNumber(1000 * seconds, 3)}\u00a0ms`;
}

/** A label of an axis: as short as it can be. */
export function formatTick(value: number): string {
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e6)) {
    const [mantissa = "1", exponent = "0"] = value.toExponential().split("e");
    const power = `10${superscript(Number(exponent))}`;
    return mantissa === "1" ? power : `${minus(mantissa)}${TIMES}${power}`;
  }
  return grouped(String(Number(value.toPrecision(6))));
}

/** A whole number as a power: ⁻⁷. */
export function superscript(value: number): string {
  return [...String(value)].map((sign) => SUPERSCRIPTS[sign] ?? sign).join("");
}

function grouped(text: string): string {
  const [whole = "", fraction] = text.split(".");
  const commas = whole.replace(/\B(?=(\d{3})+$)/g, ",");
  return minus(fraction === undefined ? commas : `${commas}.${fraction}`);
}

function trimmed(text: string): string {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function minus(text: string): string {
  return text.replace("-", "−");
}

/** A unit after the number 1: sample for samples; symbols such as Gbit/s stay. */
export function singular(unit: string): string {
  return unit.replace(/(?<=[a-z]{3})s$/, "");
}
