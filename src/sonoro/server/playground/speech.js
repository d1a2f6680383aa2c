// One request for speech: what comes is put into a take. Knows no element of the page.

import { ask, events } from "./api.js";
import { OPUS_HZ, OpusStream, bytesOf, decodesOpus } from "./opus.js";
import { Take } from "./take.js";

const SECONDS_PER_LETTER = 0.065;
const OPUS_BITS = { narrow: 48_000, wide: 64_000 }; // a second, up to 24 kHz and above: nothing is heard to be missing

/** The fields of `body` that say how the sound comes: "opus", "pcm", or "auto" for opus where the browser plays it. */
export async function soundFields(sound, rate) {
  const isOpus = sound === "opus" || (sound === "auto" && (await decodesOpus()));
  const stream = { stream_format: "sse", timestamps: ["word"] };
  if (!isOpus) return { response_format: "pcm", ...stream };
  return { response_format: "opus", bit_rate: rate > 24_000 ? OPUS_BITS.wide : OPUS_BITS.narrow, ...stream };
}

/** An empty take of `body`, for a model of `rate`. */
export function takeOf({ text, speaker, body, rate }) {
  const isOpus = body.response_format === "opus";
  const expectedS = 0.5 + SECONDS_PER_LETTER * [...text].length;
  return new Take({ text, speaker, body, rate: isOpus ? OPUS_HZ : rate, expectedS });
}

/**
 * Ask for what `take` lacks, and put it in as it comes. `note` gets figures, `onWords` is called when there are words.
 * Returns why the speech ended. Throws an `Error` in words, or an "AbortError".
 */
export async function receive(take, { signal, note, onWords }) {
  const beganMs = performance.now();
  const answer = await ask("v1/audio/speech", { signal, body: take.body });
  const decoder = take.body.response_format === "opus" ? new OpusStream() : new PCMStream();
  let reason = "stop";
  let bytes = 0;
  for await (const event of events(answer)) {
    bytes += event.bytes;
    if (event.type === "speech.words") {
      take.words.push(...(take.body.inputs ? placed(take, event.words) : event.words));
      onWords();
    }
    if (event.type === "speech.audio.done") reason = event.finish_reason;
    if (event.type !== "speech.audio.delta") continue;
    const samples = await decoder.feed(bytesOf(event.audio));
    signal.throwIfAborted();
    const isFirst = !take.length && samples.length > 0;
    const elapsedMs = performance.now() - beganMs;
    if (isFirst) note({ firstMs: elapsedMs });
    if (samples.length) take.append(samples);
    if (take.length) note({ elapsedMs, bytes });
  }
  return reason;
}

/** PCM16 little-endian, cut anywhere. */
class PCMStream {
  #half = new Uint8Array(); // the first byte of a sample whose second is still to come

  async feed(bytes) {
    const joined = new Uint8Array(this.#half.length + bytes.length);
    joined.set(this.#half);
    joined.set(bytes, this.#half.length);
    const whole = joined.length & ~1;
    this.#half = joined.slice(whole);
    const view = new DataView(joined.buffer);
    return Int16Array.from({ length: whole / 2 }, (_, index) => view.getInt16(2 * index, true));
  }
}

/** `words` of lines, found in the text that is shown: the server counts in a text with tags of voices. */
function placed(take, words) {
  let from = take.words.at(-1)?.end ?? 0;
  return words.flatMap((word) => {
    const letters = [...word.text];
    const start = find(take.letters, letters, from);
    if (start < 0) return [];
    from = start + letters.length;
    return [{ ...word, start, end: from }];
  });
}

function find(letters, part, from) {
  for (let at = from; at + part.length <= letters.length; at++) {
    if (part.every((letter, i) => letters[at + i] === letter)) return at;
  }
  return -1;
}
