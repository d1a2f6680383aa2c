// One reading of a text: its samples as they arrive, its words, and what was asked for. Knows no server and no element.

/** How much audio one of `peaks` stands for. */
export const PEAK_S = 0.02;

export class Take {
  #samples = new Int16Array(1 << 16);

  /** Samples so far, PCM16 at `rate`. */
  length = 0;
  /** The latest sample that was played. */
  heard = 0;
  /** Whether nothing more will come. */
  isWhole = false;
  /** The loudest sample of each `PEAK_S`, of 1. */
  peaks = [];
  /** Words known to be spoken when: { start, end } in `letters`, { start_s, end_s }. In order. */
  words = [];
  /** Called whenever something has come. */
  onGrown = () => {};

  /** `text` is spoken by `speaker`, as `body` asks for; `expectedS` is a guess at its length. */
  constructor({ text, speaker, body, rate, expectedS }) {
    Object.assign(this, { text, speaker, body, rate, expectedS });
    this.letters = [...text]; // by code point, as the server counts
    this.madeAt = new Date();
  }

  get durationS() {
    return this.length / this.rate;
  }

  /** Bytes that it holds. */
  get size() {
    return this.#samples.byteLength;
  }

  /** Append samples: an Int16Array, or a Float32Array in [-1, 1]. */
  append(samples) {
    const isWhole = samples instanceof Int16Array;
    const length = this.length + samples.length;
    if (length > this.#samples.length) {
      const more = new Int16Array(Math.max(length, 2 * this.#samples.length));
      more.set(this.#samples.subarray(0, this.length));
      this.#samples = more;
    }
    for (let i = 0; i < samples.length; i++) {
      const value = isWhole ? samples[i] : Math.max(-32768, Math.min(32767, Math.round(samples[i] * 32768)));
      const peak = Math.floor((this.length + i) / (PEAK_S * this.rate));
      this.#samples[this.length + i] = value;
      this.peaks[peak] = Math.max(this.peaks[peak] ?? 0, Math.abs(value) / 32768);
    }
    this.length = length;
    this.onGrown();
  }

  /** Nothing more will come; keep at most `length` samples. */
  finish(length = this.length) {
    this.length = Math.min(length, this.length);
    this.isWhole = true;
    this.peaks.length = Math.ceil(this.length / (PEAK_S * this.rate));
    this.words = this.words.filter((word) => word.start_s < this.durationS);
    this.#samples = this.#samples.slice(0, this.length);
    this.onGrown();
  }

  /** Samples `from` to `to` as a Float32Array in [-1, 1]; zeros beyond the end. */
  floats(from, to) {
    const samples = new Float32Array(to - from);
    const end = Math.min(to, this.length);
    for (let at = Math.max(from, 0); at < end; at++) samples[at - from] = this.#samples[at] / 32768;
    return samples;
  }

  /** Its PCM16 at `rate`: as it came, or resampled. */
  async pcm(rate = this.rate) {
    if (rate === this.rate || !this.length) return this.#samples.slice(0, this.length);
    const context = new OfflineAudioContext(1, Math.round((this.length / this.rate) * rate), rate);
    const buffer = context.createBuffer(1, this.length, this.rate);
    buffer.copyToChannel(this.floats(0, this.length), 0);
    const source = new AudioBufferSourceNode(context, { buffer });
    source.connect(context.destination);
    source.start();
    const samples = (await context.startRendering()).getChannelData(0);
    return Int16Array.from(samples, (sample) => Math.max(-32768, Math.min(32767, Math.round(sample * 32768))));
  }

  /** The index of the last word that begins at or before `seconds`; -1 before the first. */
  wordAt(seconds) {
    return this.words.findLastIndex((word) => word.start_s <= seconds);
  }
}

/** PCM16 `samples` as a WAV file, mono. */
export function wav(samples, rate) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (at, letters) => [...letters].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, view.byteLength - 8, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true);
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, i) => view.setInt16(44 + 2 * i, sample, true));
  return new Blob([view], { type: "audio/wav" });
}
