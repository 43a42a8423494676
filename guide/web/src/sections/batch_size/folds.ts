/** The folds of the chapter about batch size, in one script: they are small and similar. */
export { default as Lengths } from "./Lengths.svelte";
export { default as Noise } from "./Noise.svelte";
export { default as SaidOfSize } from "./SaidOfSize.svelte";
export { default as Sharpness } from "./Sharpness.svelte";
export { default as Spikes } from "./Spikes.svelte";
export { default as Strategies } from "./Strategies.svelte";
