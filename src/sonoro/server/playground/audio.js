// Sound in a page: PCM16 played as it arrives, and recordings as WAV. Knows no server and no element of the page.

/** How long a stream with nothing left to play waits before it goes on, so that the next packet is in time. */
const LEAD_S = 0.06;

/** How much audio a bar of a drawing stands for. */
export const BAR_S = 0.04;

/**
 * Plays PCM16 little-endian mono as it is fed. Made while the user presses a button: only then may a page sound.
 *
 * Chunks are scheduled one behind the other on a context of the audio's own rate, where they join sample by sample;
 * resampled one by one they would click. An AudioWorklet would do too, but not on a page from http://, as on a phone.
 */
export class Player {
  #context;
  #chunks = []; // of { samples, startS, source }
  #endS = 0;
  #half = new Uint8Array(); // the first byte of a sample whose second is still to come

  /** Samples that were fed. */
  length = 0;
  /** The loudest sample of each `BAR_S`. */
  bars = [];

  constructor(sampleRate) {
    this.sampleRate = sampleRate;
    this.#context = new AudioContext({ sampleRate });
    this.#context.resume();
  }

  /** Seconds of audio that were fed. */
  get durationS() {
    return this.length / this.sampleRate;
  }

  /** Samples that were played until now. */
  get played() {
    const now = this.#context.currentTime;
    const heard = ({ samples, startS }) => Math.round(clamp((now - startS) * this.sampleRate, 0, samples.length));
    return this.#chunks.reduce((sum, chunk) => sum + heard(chunk), 0);
  }

  /** Play `bytes` after what was fed before; they may be cut anywhere. */
  feed(bytes) {
    const joined = new Uint8Array(this.#half.length + bytes.length);
    joined.set(this.#half);
    joined.set(bytes, this.#half.length);
    const whole = joined.length & ~1;
    this.#half = joined.slice(whole);
    if (!whole) return;
    const view = new DataView(joined.buffer);
    this.#play(Float32Array.from({ length: whole / 2 }, (_, index) => view.getInt16(2 * index, true) / 32768));
  }

  /** Resolves when everything fed was played, or the player was stopped. */
  async finished() {
    const last = this.#chunks.at(-1);
    if (last && !last.isOver) await new Promise((resolve) => last.source.addEventListener("ended", resolve));
  }

  /** Be silent, and keep of the audio only what was heard. */
  stop() {
    let left = this.played;
    this.length = left;
    for (const chunk of this.#chunks) {
      chunk.source.stop();
      chunk.samples = chunk.samples.subarray(0, left);
      left -= chunk.samples.length;
    }
  }

  /** The audio, one Float32Array. */
  samples() {
    const all = new Float32Array(this.length);
    let at = 0;
    for (const { samples } of this.#chunks) {
      all.set(samples, at);
      at += samples.length;
    }
    return all;
  }

  /** Give the sound card back. The samples stay. */
  async close() {
    if (this.#context.state !== "closed") await this.#context.close();
  }

  #play(samples) {
    const buffer = this.#context.createBuffer(1, samples.length, this.sampleRate);
    buffer.copyToChannel(samples, 0);
    const source = new AudioBufferSourceNode(this.#context, { buffer });
    source.connect(this.#context.destination);
    const now = this.#context.currentTime;
    const startS = this.#endS > now ? this.#endS : now + LEAD_S;
    const chunk = { samples, startS, source, isOver: false };
    source.addEventListener("ended", () => (chunk.isOver = true));
    source.start(startS);
    this.#endS = startS + samples.length / this.sampleRate;
    this.#chunks.push(chunk);
    for (const sample of samples) {
      const bar = Math.floor(this.length++ / (BAR_S * this.sampleRate));
      this.bars[bar] = Math.max(this.bars[bar] ?? 0, Math.abs(sample));
    }
  }
}

/** `samples` in [-1, 1] as a WAV file of 16 bits, mono. */
export function wav(samples, sampleRate) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (at, letters) => [...letters].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, view.byteLength - 8, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true);
  view.setUint32(24, sampleRate, true);
  view.setUint32(28, 2 * sampleRate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, i) => view.setInt16(44 + 2 * i, clamp(Math.round(sample * 32768), -32768, 32767), true));
  return new Blob([view], { type: "audio/wav" });
}

/** `file`, in any format the browser reads, as a mono WAV file of `sampleRate`. Throws what to tell the user. */
export async function asWav(file, sampleRate) {
  let decoded;
  try {
    decoded = await new OfflineAudioContext(1, 1, sampleRate).decodeAudioData(await file.arrayBuffer());
  } catch {
    throw new Error("This file holds no audio that the browser can read.");
  }
  const channels = Array.from({ length: decoded.numberOfChannels }, (_, index) => decoded.getChannelData(index));
  const mono = channels[0].map((_, at) => channels.reduce((sum, channel) => sum + channel[at], 0) / channels.length);
  return wav(mono, sampleRate);
}

/** Records the microphone from now on. Resolves to a function that ends it and resolves to the recording. */
export async function record() {
  // A page that is not from https:// or this machine has no microphones.
  if (!navigator.mediaDevices) throw new Error("The browser records only on a page from https:// or localhost.");
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  } catch (error) {
    throw new Error(`There is no microphone to record with (${error.message}).`);
  }
  const recorder = new MediaRecorder(stream);
  const parts = [];
  recorder.addEventListener("dataavailable", ({ data }) => parts.push(data));
  const stopped = new Promise((resolve) => recorder.addEventListener("stop", resolve));
  recorder.start();
  return async () => {
    recorder.stop();
    await stopped;
    stream.getTracks().forEach((track) => track.stop());
    return new Blob(parts, { type: recorder.mimeType });
  };
}

function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}
