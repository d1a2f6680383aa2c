// Recordings to speak like: from the microphone or a file. Knows no server and no element of the page.

import { wav } from "./take.js";

const LONGEST_S = 60;

/** `file`, in any format the browser reads, as a mono WAV file of `rate`. Throws what to tell the user. */
export async function asWav(file, rate) {
  let decoded;
  try {
    decoded = await new OfflineAudioContext(1, 1, rate).decodeAudioData(await file.arrayBuffer());
  } catch {
    // A recording that was ended before its first samples came is a container without any.
    const none = "Nothing was recorded. Record for a second or longer.";
    throw new Error(file instanceof File ? "This file holds no audio that the browser can read." : none);
  }
  const channels = Array.from({ length: decoded.numberOfChannels }, (_, index) => decoded.getChannelData(index));
  const mono = Int16Array.from(channels[0], (_, at) => {
    const sample = channels.reduce((sum, channel) => sum + channel[at], 0) / channels.length;
    return Math.max(-32768, Math.min(32767, Math.round(sample * 32768)));
  });
  return wav(mono, rate);
}

/** Records the microphone, one recording at a time. */
export class Recorder {
  #asked = 0; // counts the times that the microphone was asked for
  #recorder = null;
  #limit = 0;

  /** idle, asking or recording; `onChange` is called when it changes. */
  state = "idle";

  constructor(onChange) {
    this.onChange = onChange;
  }

  /** Begin, cancel while the browser asks, or end. Resolves to the recording once it has ended; null if cancelled. */
  async toggle() {
    if (this.state !== "idle") {
      this.#stop();
      return null;
    }
    // A page that is not from https:// or this machine has no microphones.
    if (!navigator.mediaDevices) throw new Error("The browser records only on a page from https:// or localhost.");
    const number = ++this.#asked;
    this.#become("asking");
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    } catch (error) {
      if (this.#asked === number) this.#become("idle");
      throw new Error(`There is no microphone to record with (${error.message}).`);
    }
    try {
      return this.#asked === number && this.state === "asking" ? await this.#record(stream) : null;
    } finally {
      stream.getTracks().forEach((track) => track.stop());
    }
  }

  async #record(stream) {
    const parts = [];
    this.#recorder = new MediaRecorder(stream);
    this.#recorder.addEventListener("dataavailable", ({ data }) => parts.push(data));
    const stopped = new Promise((resolve) => this.#recorder.addEventListener("stop", resolve));
    this.#recorder.start();
    this.#limit = setTimeout(() => this.#stop(), 1000 * LONGEST_S);
    this.#become("recording");
    await stopped;
    this.#become("idle");
    return new Blob(parts, { type: this.#recorder.mimeType });
  }

  #stop() {
    clearTimeout(this.#limit);
    if (this.state === "recording") this.#recorder.stop();
    else this.#become("idle");
  }

  #become(state) {
    this.state = state;
    this.onChange();
  }
}
