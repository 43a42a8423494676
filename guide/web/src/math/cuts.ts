/** The split of an effective batch, in numbers. */

export interface Cut {
  /** Samples of one step, over all ranks. */
  effective: number;
  /** Samples of one forward and backward. */
  micro: number;
  ranks: number;
}

/** Units of the effective batch, in order: first sample, samples, and the rank that runs it. */
export interface Unit {
  number: number;
  first: number;
  samples: number;
  rank: number;
}

/** Micro-batches one rank runs for a step. */
export function accumulationSteps(cut: Cut): number {
  return Math.ceil(cut.effective / (cut.micro * cut.ranks));
}

/** The units of a split into equal parts; each rank gets consecutive units. */
export function units(cut: Cut): Unit[] {
  const steps = accumulationSteps(cut);
  return Array.from({ length: steps * cut.ranks }, (_, number) => ({
    number,
    first: number * cut.micro,
    samples: cut.micro,
    rank: Math.floor(number / steps),
  }));
}
