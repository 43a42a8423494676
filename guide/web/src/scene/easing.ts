/** Curves of motion: functions of progress from 0 to 1. */
export const clamp = (x: number) => (x < 0 ? 0 : x > 1 ? 1 : x);
/** The progress of `t` from one moment to another. */
export const ramp = (t: number, from: number, to: number) => clamp((t - from) / (to - from));
export const mix = (a: number, b: number, p: number) => a + (b - a) * p;
export const smooth = (p: number) => p * p * (3 - 2 * p);
export const glide = (p: number) => (p < 0.5 ? 4 * p * p * p : 1 - (2 - 2 * p) ** 3 / 2);
export const settle = (p: number) => 1 - (1 - p) ** 3;
/** Leans back before it leaves. */
export const windUp = (p: number, strength = 1.1) =>
  p < 0.5 ? (4 * p * p * ((strength + 1) * 2 * p - strength)) / 2 : 1 - (2 - 2 * p) ** 3 / 2;
/** Passes its goal before it rests there. */
export const overshoot = (p: number, strength = 1.5) => 1 + (strength + 1) * (p - 1) ** 3 + strength * (p - 1) ** 2;
/** Rises and falls. */
export const bell = (p: number) => Math.sin(Math.PI * clamp(p));
/** A fixed random number for an index. */
export const noise = (at: number) => (((Math.sin(at * 127.1 + 11.7) * 43758.5453) % 1) + 1) % 1;
