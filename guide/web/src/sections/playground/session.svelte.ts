/** The state of the playground: the setting of the controls, the run on the stage, and pinned runs. */
import { parse, read, write } from "../../data/address";
import { announce } from "../../data/announce.svelte";
import { cancel, command, guide, onLines, onResult, start } from "../../data/guide.svelte";
import { Pace } from "../../data/pace";
import { storePins, storedPins, type PinnedRun } from "../../data/pins";
import { fetchRecording, recording } from "../../data/recordings";
import {
  addressShape, effective, emptyRun, fromAddress, liveStrip, nearest, nameOf, predictedPeak, presetSetting, recordedStrip, refusal, replayedAt, RunBuilder, sameSetting, TASKS, toAddress, upTo, withTask,
  type GradientStrip, type Grid, type Opening, type Preset, type Run,
} from "../../data/runs";
import type { From, Line, Made, Recording, Setting } from "../../data/types";

export const MAX_PINNED = 4;

export class Session {
  readonly opening = recording<Opening>("playground_opening").data;
  readonly first = this.opening.runs[0] as Run;
  readonly openingFrom: From = { kind: "recorded", name: "playground_opening" };

  /** The setting of the controls; each run has its own. */
  setting: Setting = $state({ ...this.first.setting });
  preset = $state.raw<Preset | null>(null);
  /** The displayed run; null before the first one. */
  held = $state.raw<PinnedRun | null>(null);
  /** Pinned runs of all tasks. */
  pinned: PinnedRun[] = $state.raw([]);
  grids: Partial<Record<Setting["task"], Grid>> = $state.raw({});
  liveRun = $state.raw<RunBuilder | null>(null);
  /** The place of the replay; null without one. */
  replayed: ReturnType<typeof replayedAt> = $state.raw(null);
  /** Number of micro-batches shown of the first recorded step, without an engine. */
  walked = $state(0);
  /** Whether the nearest recorded run replaced the wanted one. */
  snapped = $state(false);
  tick = $state(0);
  /** The run that ended last. */
  #ended = $state.raw<RunBuilder | null>(null);
  /** Id of the run that this page started; null while it starts. */
  #started: string | null = "";
  /** Lines of the current run that are held back, and the result that follows them. */
  #pace: Pace | null = null;
  #result: Recording | null = null;
  /** Whether lines are held back, and whether the reader paused the display there. */
  holding = $state(false);
  frozen = $state(false);
  /** Id of the run that is or was held back. */
  #paced = "";
  #frame = 0;
  #following = 0;

  readonly live = $derived(guide.mode === "live");
  readonly why = $derived(refusal(this.setting, this.opening));
  readonly link = $derived(write("playground", toAddress(this.setting)));
  readonly #isEngineRunning = $derived(this.liveRun !== null && guide.status.run === this.liveRun.id);
  readonly isRunning = $derived(this.#isEngineRunning || this.holding);
  readonly isPaused = $derived(this.frozen || (this.#isEngineRunning && guide.status.paused));
  readonly isDone = $derived(this.liveRun === null && this.replayed === null);
  readonly canTrain = $derived(guide.ready && this.why === null && (!this.live || guide.status.worker === "idle"));
  readonly recordedRuns: PinnedRun[] = $derived([
    ...this.opening.runs.map((run) => ({ run, from: this.openingFrom })),
    ...TASKS.flatMap((task) => (this.grids[task]?.runs ?? []).map((run): PinnedRun => ({ run, from: { kind: "recorded", name: `playground_${task}` } }))),
  ]);
  /** The run on the stage: the current run, the displayed one, or the setting before its first step. */
  readonly shown: PinnedRun = $derived.by(() => {
    void this.tick;
    if (this.liveRun) return { run: { ...this.liveRun.run }, from: fromNow(this.liveRun.made) };
    if (this.held === null) return { run: emptyRun(this.setting), from: { kind: "chosen", note: "nothing has run yet" } };
    return this.replayed === null ? this.held : { run: upTo(this.held.run, this.replayed.steps), from: this.held.from };
  });
  /** Pinned runs that can be compared with the run on the stage. */
  readonly pins = $derived(this.pinned.filter(({ run }) => run.setting.task === this.shown.run.setting.task));
  /** A recorded run with the same initial weights and first batch. */
  readonly alike: PinnedRun | undefined = $derived.by(() => {
    const { setting } = this.shown.run;
    return this.recordedRuns.find(({ run: { setting: of } }) => of.task === setting.task && of.norm === setting.norm && of.seed === setting.seed && effective(of) === effective(setting));
  });
  /** Position of the current run. */
  readonly at = $derived.by(() => {
    void this.tick;
    const { step, position, of, second } = this.liveRun ?? { step: 0, position: -1, of: 0, second: -1 };
    return { step, position, of, second };
  });
  /** The gradient of the current step, live or recorded; null if it is neither. */
  readonly strip: { strip: GradientStrip; from: From } | null = $derived.by(() => {
    void this.tick;
    const builder = this.liveRun ?? (this.#ended?.run === this.held?.run ? this.#ended : null);
    if (builder) return { strip: liveStrip(builder.seen, builder.natives), from: fromNow(builder.made) };
    const { run, from } = this.shown;
    const recorded = recordedStrip(run, this.replayed?.added);
    if (recorded) return { strip: recorded, from };
    if (!this.walked && !(run.losses.length === 0 && sameSetting(run.setting, this.first.setting))) return null;
    const seen = this.opening.first_micro_batches.slice(0, this.walked).slice(-1);
    return { strip: liveStrip(seen, [{ step: 0, gradient: this.opening.first_native_gradient }]), from: this.openingFrom };
  });

  predicted(of: Setting): number | null {
    return predictedPeak(of, this.recordedRuns.map(({ run }) => run));
  }

  choices(key: "micro_batch_size" | "accumulation_steps" | "memory_limit_kib"): number[] {
    const found = this.recordedRuns.filter(({ run }) => run.setting.task === this.setting.task).map(({ run }) => run.setting[key]);
    return [...new Set(found)].sort((a, b) => a - b);
  }

  async load(task: Setting["task"]): Promise<void> {
    if (this.grids[task]) return;
    const grid = await fetchRecording<Grid>(`playground_${task}`).catch(() => null);
    if (grid) this.grids = { ...this.grids, [task]: grid.data };
  }

  choose<Key extends keyof Setting>(key: Key, value: Setting[Key]): void {
    const { opening, setting } = this;
    this.preset = null;
    if (key === "task") this.setting = withTask({ ...setting, mistake: "" }, value as Setting["task"], opening);
    else if (key === "optimizer") this.setting = { ...setting, optimizer: value as Setting["optimizer"], learning_rate: opening.beginnings[setting.task][value as Setting["optimizer"]] };
    else this.setting = { ...setting, [key]: value, ...(key === "norm" ? { norm_policy: "keep" as const } : {}) };
    void this.#changed(key);
  }

  /** Apply a preset, and train it. */
  async choosePreset(preset: Preset): Promise<void> {
    this.setting = presetSetting(preset, this.opening);
    this.preset = preset;
    await this.#changed();
    await this.train();
  }

  /** After a change: without an engine, show the recorded run of the setting, or the nearest one; with an engine, keep the displayed run until the next training. */
  async #changed(key?: keyof Setting): Promise<void> {
    this.snapped = false;
    this.replayed = null;
    this.walked = 0;
    if (this.liveRun && !this.isRunning) {
      this.held = { run: this.liveRun.run, from: fromNow(this.liveRun.made) };
      this.liveRun = null;
    }
    await this.load(this.setting.task);
    if (!this.live) {
      const exact = this.recordedRuns.find(({ run }) => sameSetting(run.setting, this.setting));
      if (exact) this.held = exact;
      else this.#snap(key);
    } else if (this.held?.from.kind === "recorded") this.held = null;
    if (history.replaceState) history.replaceState(history.state, "", this.link);
  }

  #snap(key?: keyof Setting): void {
    const near = nearest(this.setting, this.recordedRuns.map(({ run }) => run), key);
    const found = this.recordedRuns.find(({ run }) => run === near);
    if (!found) return;
    this.setting = { ...found.run.setting };
    this.held = found;
    this.snapped = true;
    announce(`Showing the nearest recorded run: ${nameOf(found.run)}.`);
  }

  async train(paused = false): Promise<string | null> {
    if (!this.live) return this.#replay();
    this.#release();
    this.#started = null;
    const id = await start({ kind: "playground", setting: { ...this.setting }, paused });
    this.#started = id ?? "";
    // A short run may have started, and even ended, before the response arrives.
    if (id !== null && id !== this.#ended?.id && this.liveRun?.id !== id) this.liveRun = new RunBuilder(id, { ...this.setting });
    return id;
  }

  /** Without an engine, replay the recorded run; with reduced motion, show it immediately. */
  async #replay(): Promise<null> {
    await this.load(this.setting.task);
    this.walked = 0;
    this.held = this.recordedRuns.find(({ run }) => sameSetting(run.setting, this.setting)) ?? this.held;
    if (this.held === null || matchMedia("(prefers-reduced-motion: reduce)").matches) return null;
    const { run } = this.held;
    const begun = performance.now();
    this.replayed = { steps: 0, added: 0 };
    const go = (now: number) => {
      if (this.replayed === null || this.held?.run !== run) return;
      this.replayed = replayedAt(Math.max(0, now - begun) / 1000, run);
      if (this.replayed !== null) requestAnimationFrame(go);
    };
    requestAnimationFrame(go);
    return null;
  }

  async oneMicroBatch(): Promise<void> {
    if (!this.live) {
      this.walked = (this.walked % this.opening.first_micro_batches.length) + 1;
      return;
    }
    if (this.holding && this.#pace) {
      this.frozen = true;
      if (this.#isEngineRunning && !guide.status.paused) void command("pause");
      this.#show(this.#pace.one(performance.now()));
      return;
    }
    await command("micro", this.isRunning ? guide.status.run : await this.train(true));
  }

  /** Pause or resume the engine, and the display of lines that are held back. */
  togglePause(): void {
    const word = this.isPaused ? "resume" : "pause";
    this.frozen = word === "pause" && this.holding;
    if (this.#isEngineRunning) void command(word);
  }

  /** Stop the engine, and show everything that it has computed. */
  stop(): void {
    if (this.#isEngineRunning) void cancel();
    this.#release();
  }

  /** Show all lines that are held back, and hold back no more of this run. */
  #release(): void {
    const lines = this.#pace?.all() ?? [];
    this.#show(lines);
    this.#pace = null;
  }

  /** Show lines of the current run; after the last one that was held back, show the result. */
  #show(lines: readonly Line[]): void {
    this.liveRun?.take(lines);
    this.holding = this.#pace !== null && !this.#pace.isEmpty;
    this.frozen &&= this.holding;
    this.#draw();
    if (!this.holding && this.#result) this.#finish(this.#result);
  }

  /** Release lines, frame by frame. */
  #follow = (now: number): void => {
    if (!this.holding || !this.#pace) return;
    const lines = this.frozen ? [] : this.#pace.take(now);
    if (lines.length) this.#show(lines);
    this.#following = this.holding ? requestAnimationFrame(this.#follow) : 0;
  };

  #finish({ made }: Recording): void {
    this.#result = null;
    this.#pace = null;
    if (!this.liveRun) return;
    this.#ended = this.liveRun;
    this.liveRun.made = made;
    this.held = { run: this.liveRun.run, from: fromNow(made) };
    this.liveRun = null;
  }

  pin(): void {
    const { run, from } = this.shown;
    if (this.pins.length >= MAX_PINNED || run.losses.length === 0) return;
    this.setPins([...this.pinned, { run: { ...run }, from }]);
    announce(`Pinned. ${this.pins.length} of ${MAX_PINNED}.`);
  }

  setPins(pins: PinnedRun[]): void {
    this.pinned = pins;
    storePins(pins, sessionStorage);
  }

  /** Take the setting from the address; what it does not name is as in the first run. */
  #arrive = (): void => {
    const { section, values } = parse(location.hash);
    if (section !== "playground" || [...values.keys()].length === 0) return;
    const wish = fromAddress(read(addressShape, values, toAddress(this.first.setting)));
    if (sameSetting(wish, this.setting)) return;
    this.setting = wish;
    this.preset = null;
    void this.#changed();
  };

  /** Follow the runs of the engine, and the address; the result ends it. */
  open(): () => void {
    this.pinned = storedPins(sessionStorage);
    const stops = [
      onLines((id, lines) => {
        if (this.liveRun?.id !== id) {
          const started = guide.status.run === id && guide.status.kind === "playground" ? guide.status.setting : undefined;
          if (!started) return;
          this.#release();
          this.liveRun = new RunBuilder(id, started);
          // A run of another tab, or of this one before a reload: the controls follow it.
          if (this.#started !== null && id !== this.#started) this.setting = { ...started };
        }
        if (this.#paced !== id && (this.#started === null || this.#started === id)) {
          this.#paced = id;
          this.#pace = matchMedia("(prefers-reduced-motion: reduce)").matches ? null : new Pace();
        }
        if (!this.#pace) return this.#show(lines);
        this.#pace.add(lines);
        if (this.holding) return;
        // Single micro-batches are shown when they are asked for.
        this.#show(guide.status.paused ? this.#pace.all() : this.#pace.take(performance.now()));
        if (!this.holding) return;
        cancelAnimationFrame(this.#following);
        this.#following = requestAnimationFrame(this.#follow);
      }),
      onResult((result) => {
        if (result.name !== "playground" || !this.liveRun) return;
        if (this.holding) this.#result = result;
        else this.#finish(result);
      }),
    ];
    window.addEventListener("hashchange", this.#arrive);
    this.#arrive();
    return () => {
      for (const stop of stops) stop();
      cancelAnimationFrame(this.#frame);
      cancelAnimationFrame(this.#following);
      window.removeEventListener("hashchange", this.#arrive);
    };
  }

  /** Messages arrive faster than frames: redraw once per frame. */
  #draw(): void {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.tick += 1;
    });
  }
}

function fromNow(made: Made | null): From {
  return made ? { kind: "live", name: "playground", made } : { kind: "live", name: "playground" };
}
