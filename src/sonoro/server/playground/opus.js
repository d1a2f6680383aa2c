// Decodes Ogg Opus as it arrives, with what every browser has: `decodeAudioData`, which takes whole files alone. So each
// group of new pages is decoded behind the header and the pages before it. Knows no server and no element of the page.

export const OPUS_HZ = 48000;

const PACKET = 960; // samples of a page: 20 ms
const BEFORE = 12; // pages decoded again before new ones, so that the decoder has come to the same state
const HEADERS = 2;

// 50 ms of silence.
const TRIAL =
  "T2dnUwACAAAAAAAAAABwCVplAAAAAJtSpFoBE09wdXNIZWFkAQE4AUAfAAAAAABPZ2dTAAAAAAAAAAAAAHAJWmUBAAAAL3gKKAE2T3B1c1RhZ3MN" +
  "AAAATGF2ZjYyLjEyLjEwMgEAAAAVAAAAZW5jb2Rlcj1MYXZmNjIuMTIuMTAyT2dnUwAAwAMAAAAAAABwCVplAgAAACfV81MBBwgL5LmgvIRPZ2dT" +
  "AAT4BAAAAAAAAHAJWmUDAAAADARIJgEGCAfGsw7G";

let trial = null;

/** Whether this browser decodes Ogg Opus; found out once, by trying. */
export function decodesOpus() {
  trial ??= decode([bytesOf(TRIAL)]).then(
    (samples) => samples.length > 0,
    () => false,
  );
  return trial;
}

export function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
}

/** Samples [S] in [-1, 1] at `OPUS_HZ` of a stream of Ogg Opus with a packet of 20 ms a page. */
export class OpusStream {
  #pages = []; // the headers, and the last `BEFORE` of those that were decoded
  #rest = new Uint8Array();
  #skip = 0; // samples that a decoder leaves out at its start

  /** The samples of the pages that `bytes` complete. One call at a time. */
  async feed(bytes) {
    const pages = this.#split(bytes);
    const headers = Math.min(Math.max(HEADERS - this.#pages.length, 0), pages.length);
    this.#pages.push(...pages.splice(0, headers));
    if (headers) this.#skip = skipOf(this.#pages[0]);
    if (!pages.length) return new Float32Array();
    const again = this.#pages.length - HEADERS;
    this.#pages.push(...pages);
    const samples = await decode(this.#pages);
    this.#pages.splice(HEADERS, this.#pages.length - HEADERS - BEFORE);
    return samples.subarray(again ? again * PACKET - this.#skip : 0);
  }

  #split(bytes) {
    let data = joined([this.#rest, bytes]);
    const pages = [];
    for (let size = sizeOf(data); size && size <= data.length; size = sizeOf(data)) {
      pages.push(data.slice(0, size));
      data = data.subarray(size);
    }
    this.#rest = data.slice();
    return pages;
  }
}

/** The bytes of the page that `data` begins with; 0 if that cannot be known yet. */
function sizeOf(data) {
  const segments = data[26];
  if (data.length < 27 + segments || segments === undefined) return 0;
  return data.subarray(27, 27 + segments).reduce((sum, size) => sum + size, 27 + segments);
}

function skipOf(header) {
  const at = 27 + header[26] + "OpusHead".length + 2;
  return header[at] + 256 * header[at + 1];
}

async function decode(pages) {
  const file = joined(pages);
  const decoded = await new OfflineAudioContext(1, 1, OPUS_HZ).decodeAudioData(file.buffer);
  return decoded.getChannelData(0);
}

function joined(parts) {
  const all = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all;
}
