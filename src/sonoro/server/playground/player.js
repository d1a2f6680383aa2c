// Plays a take while it arrives, and again: pause, seek, speed, loop. Knows no server and no element of the page.

import { Stretch } from "./stretch.js";

const AHEAD_S = 1.5; // of sound scheduled: timers of a hidden page come once a second
const PIECE_S = 0.1;
const LEAD_S = 0.05; // from now to the first sound
const TURN_MS = 40;
const CUSHION_S = 0.2; // that must have come before it plays; twice as much after each stall
const MOST_CUSHION_S = 4;

/**
 * Events: "change" when `state` changes. Pieces are scheduled one behind the other on a context of the take's own rate,
 * where they join sample by sample. An AudioWorklet would do too, but not on a page from http://, as on a phone.
 */
export class Player extends EventTarget {
  #context = null;
  #pieces = []; // scheduled: { source, startS, endS, from, to }
  #next = 0; // the sample to schedule next, or that a stopped player stands at
  #endS = 0; // when what is scheduled ends
  #stretch = null;
  #timer = 0;
  #cushionS = CUSHION_S;
  #speed = 1;

  /** idle, buffering, playing, paused or ended. */
  state = "idle";
  take = null;
  isLooping = false;
  /** How often what had come was used up, since the take was opened. */
  stalls = 0;

  /** Sound `take` next, from its start. Call it while the user presses something: only then may a page sound. */
  open(take) {
    this.#silence(0);
    this.take = take;
    [this.stalls, this.#cushionS] = [0, CUSHION_S];
    take.onGrown = () => {
      if (this.take === take && this.state === "buffering") this.#turn();
      this.dispatchEvent(new Event("grown"));
    };
    if (this.#context?.sampleRate !== take.rate) {
      this.#context?.close();
      this.#context = new AudioContext({ sampleRate: take.rate });
    }
    this.#become("paused");
  }

  get isRunning() {
    return this.state === "playing" || this.state === "buffering";
  }

  /** The sample that is heard now. */
  get position() {
    if (!this.#pieces.length) return this.#next;
    const now = this.#context.currentTime - (this.#context.outputLatency || 0);
    const piece = this.#pieces.findLast(({ startS }) => startS <= now) ?? this.#pieces[0];
    const share = Math.min(Math.max((now - piece.startS) / (piece.endS - piece.startS), 0), 1);
    return Math.round(piece.from + share * (piece.to - piece.from));
  }

  get speed() {
    return this.#speed;
  }

  set speed(speed) {
    this.#speed = speed;
    if (this.take) this.seek(this.position);
  }

  play() {
    if (!this.take || this.isRunning) return;
    this.#context.resume();
    if (this.take.isWhole && this.#next >= this.take.length) this.#next = 0;
    this.#become("buffering");
    this.#turn();
  }

  pause() {
    if (!this.isRunning) return;
    this.#silence(this.position);
    this.#become("paused");
  }

  toggle() {
    if (this.isRunning) this.pause();
    else this.play();
  }

  /** Go on from `sample`, playing or not. */
  seek(sample) {
    const wasRunning = this.isRunning;
    this.#silence(Math.max(0, Math.min(Math.round(sample), this.take.length)));
    if (wasRunning) {
      this.#become("buffering");
      this.#turn();
    } else {
      this.#become("paused");
    }
    this.dispatchEvent(new Event("moved"));
  }

  #become(state) {
    if (state === this.state) return;
    this.state = state;
    this.dispatchEvent(new Event("change"));
  }

  /** Drop what is scheduled; stand at sample `at`. */
  #silence(at) {
    clearTimeout(this.#timer);
    this.#note();
    for (const { source } of this.#pieces) source.stop();
    [this.#pieces, this.#next, this.#stretch, this.#endS] = [[], at, null, 0];
  }

  #note() {
    if (this.#pieces.length) this.take.heard = Math.max(this.take.heard, this.position);
  }

  /** Schedule what there is, and say how it stands. */
  #turn() {
    clearTimeout(this.#timer);
    const now = this.#context.currentTime;
    this.#note();
    if (this.state === "playing" && now >= this.#endS) this.#runDry();
    if (!this.isRunning) return;
    if (this.state === "buffering" && this.#mayBegin()) {
      this.#endS = now + LEAD_S;
      this.#become("playing");
    }
    if (this.state === "playing") {
      while (this.#endS < now + AHEAD_S && this.#schedule());
      const kept = this.#pieces.findLastIndex(({ endS }) => endS < now - 1);
      this.#pieces.splice(0, kept);
      if (this.#pieces.length) this.#timer = setTimeout(() => this.#turn(), TURN_MS);
      else this.#runDry();
    }
  }

  #mayBegin() {
    const { take } = this;
    return take.isWhole || take.length - this.#next >= this.#cushionS * take.rate * Math.max(this.#speed, 1);
  }

  #runDry() {
    this.#silence(Math.min(this.#next, this.take.length));
    if (this.take.isWhole) {
      this.take.heard = this.take.length;
      this.#become("ended");
      return;
    }
    this.stalls += 1;
    this.#cushionS = Math.min(2 * this.#cushionS, MOST_CUSHION_S);
    this.#become("buffering");
  }

  /** Schedule one piece; false if there is none. */
  #schedule() {
    const { take } = this;
    if (this.isLooping && take.isWhole && take.length && this.#next >= take.length) {
      [this.#next, this.#stretch] = [0, null];
    }
    const from = this.#next;
    const samples = this.#speed === 1 ? this.#plain() : this.#stretched();
    if (!samples.length) return false;
    const buffer = this.#context.createBuffer(1, samples.length, take.rate);
    buffer.copyToChannel(samples, 0);
    const source = new AudioBufferSourceNode(this.#context, { buffer });
    source.connect(this.#context.destination);
    source.start(this.#endS);
    const startS = this.#endS;
    this.#endS += samples.length / take.rate;
    this.#pieces.push({ source, startS, endS: this.#endS, from, to: this.#next });
    return true;
  }

  #plain() {
    const from = this.#next;
    this.#next = Math.min(from + Math.round(PIECE_S * this.take.rate), this.take.length);
    return this.take.floats(from, this.#next);
  }

  #stretched() {
    this.#stretch ??= new Stretch(this.take, this.#next, this.#speed);
    const parts = [];
    for (let part = this.#stretch.next(); part; part = parts.length < 5 ? this.#stretch.next() : null) parts.push(part);
    if (parts.length) this.#next = Math.min(this.#stretch.at, this.take.length);
    return parts.reduce((all, part, i) => (all.set(part, i * part.length), all), new Float32Array(parts.length * (parts[0]?.length ?? 0)));
  }
}
