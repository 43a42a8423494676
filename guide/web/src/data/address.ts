/**
 * The state of the page, as the part of an address after the `#`: `#playground?v=1&micro=16&accumulation=4`.
 * Unknown keys are ignored, and values out of range fall back, so that any address gives a page that works.
 */

export type Reader<Value> = (text: string) => Value | undefined;
export type Shape = Record<string, Reader<unknown>>;
export type ValueOf<S extends Shape> = { [Key in keyof S]: S[Key] extends Reader<infer Value> ? Value : never };

const VERSION = "1";

/** A whole number within limits. */
export function whole(minimum: number, maximum: number): Reader<number> {
  return (text) => {
    const value = /^-?\d{1,15}$/.test(text) ? Number(text) : Number.NaN;
    return value >= minimum && value <= maximum ? value : undefined;
  };
}

/** A number within limits. */
export function real(minimum: number, maximum: number): Reader<number> {
  return (text) => {
    const value = /^-?\d+(\.\d+)?(e-?\d+)?$/i.test(text) ? Number(text) : Number.NaN;
    return value >= minimum && value <= maximum ? value : undefined;
  };
}

/** One of several words. */
export function oneOf<const Word extends string>(...words: Word[]): Reader<Word> {
  return (text) => words.find((word) => word === text);
}

/** The section of an address, and its values. */
export function parse(hash: string): { section: string; values: URLSearchParams } {
  const [section = "", query = ""] = hash.replace(/^#/, "").split("?", 2);
  const values = new URLSearchParams(query);
  return { section, values: values.get("v") === VERSION ? values : new URLSearchParams() };
}

/** Values of an address; missing or invalid ones come from `fallback`. */
export function read<S extends Shape>(shape: S, values: URLSearchParams, fallback: ValueOf<S>): ValueOf<S> {
  const found = Object.entries(shape).map(([key, reader]) => {
    const text = values.get(key);
    const value = text === null ? undefined : reader(text);
    return [key, value ?? fallback[key as keyof S]];
  });
  return Object.fromEntries(found) as ValueOf<S>;
}

/** The address of a section in a state. */
export function write(section: string, values: Record<string, string | number>): string {
  const query = new URLSearchParams({ v: VERSION });
  for (const [key, value] of Object.entries(values)) query.set(key, String(value));
  return `#${section}?${query}`;
}
