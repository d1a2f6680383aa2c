// The large player: its buttons, the drawing, the words and the clock.

import { drawWave } from "./wave.js";
import { Transcript } from "./transcript.js";

const STEP_S = 2; // for speech without word times

/** The part of `page` that shows `player`. */
export class Panel {
  #transcript;
  #isDrawn = false;

  constructor(page, player) {
    Object.assign(this, { page, player });
    this.#transcript = new Transcript(page.spoken, (word) => this.#go(word.start_s));
    page.play.addEventListener("click", () => player.toggle());
    page.back.addEventListener("click", () => this.step(-1));
    page.on.addEventListener("click", () => this.step(1));
    page.loop.addEventListener("click", () => {
      player.isLooping = !player.isLooping;
      page.loop.setAttribute("aria-pressed", player.isLooping);
    });
    page.speed.addEventListener("change", () => (player.speed = Number(page.speed.value)));
    page.position.addEventListener("input", () => this.#go(Number(page.position.value)));
    page.position.addEventListener("keydown", (event) => this.#pressed(event));
    player.addEventListener("change", () => this.#changed());
    for (const name of ["grown", "moved"]) player.addEventListener(name, () => this.#ask());
    new ResizeObserver(() => this.#ask()).observe(page.wave);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#ask());
  }

  /** Show `take`, which the player has opened. */
  open(take) {
    const { page } = this;
    page.speaker.textContent = take.speaker;
    page.player.classList.add("open");
    for (const control of page.player.querySelectorAll("button, select, input")) control.disabled = false;
    this.#transcript.show(take);
    this.#ask();
  }

  /** Words of the take came. */
  addWords() {
    this.#transcript.update();
  }

  /** A word back or on; some seconds where no word times are known. */
  step(by) {
    const { take, position, state } = this.player;
    if (!take) return;
    const nowS = position / take.rate;
    if (!take.words.length) {
      this.#go(nowS + by * STEP_S);
      return;
    }
    const at = take.wordAt(nowS + 1e-3);
    // Back is to the start of the word first, if it has been heard for a while.
    const isInside = by < 0 && at >= 0 && (state === "ended" || nowS - take.words[at].start_s > 0.4);
    const word = take.words[Math.max(isInside ? at : at + by, 0)];
    this.#go(word ? word.start_s : take.durationS);
  }

  #go(seconds) {
    const { player } = this;
    if (player.take) player.seek(seconds * player.take.rate);
  }

  #pressed(event) {
    const step = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    this.step(step);
  }

  #changed() {
    const { page, player } = this;
    page.play.classList.toggle("on", player.isRunning);
    page.play.setAttribute("aria-label", player.isRunning ? "Pause" : "Play");
    page.player.classList.toggle("buffering", player.state === "buffering");
    this.#ask();
  }

  /** Draw at the next frame, and at each while it plays. */
  #ask() {
    if (this.#isDrawn) return;
    this.#isDrawn = true;
    requestAnimationFrame(() => {
      this.#isDrawn = false;
      this.#draw();
      if (this.player.isRunning) this.#ask();
    });
  }

  #draw() {
    const { page, player } = this;
    const { take, position } = player;
    const totalS = take ? (take.isWhole ? take.durationS : Math.max(take.durationS * 1.02, take.expectedS)) : 1;
    drawWave(page.wave, take, position, totalS);
    if (!take) return;
    const nowS = position / take.rate;
    const index = player.state === "ended" ? take.words.length : take.wordAt(nowS);
    this.#transcript.light(player.state === "paused" && !position ? -1 : index);
    Object.assign(page.position, { max: totalS, value: nowS });
    const shown = `${clock(nowS)} of ${clock(take.durationS)}`;
    if (page.position.getAttribute("aria-valuetext") !== shown) page.position.setAttribute("aria-valuetext", shown);
    page.now.textContent = clock(nowS);
    page.total.textContent = take.isWhole ? clock(take.durationS) : `${clock(take.durationS)} so far`;
  }
}

export function clock(seconds) {
  const whole = Math.floor(seconds + 1e-3);
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}
