// The page: what is typed goes to the speech API, and what comes back is heard, drawn and counted as it arrives. Where
// the model tells when its words are spoken, the one that is heard is marked.

import { BAR_S, Player, asWav, record, wav } from "./audio.js";

const REFERENCE_HZ = 24000;
const RETRY_MS = 1000;

const page = Object.fromEntries([...document.querySelectorAll("[id]")].map((element) => [element.id, element]));

let model = null; // what /v1/models says of it
let player = null; // of the speech heard last
let speaking = null; // the AbortController of a speech under way
let letters = []; // what is spoken, by code point, as the places of words are counted
let words = []; // of it, those that are known to be spoken when
let reference = null; // a recording to speak like, as a data: URL
let endRecording = null; // what ends the recording under way
let isAsking = false; // for the microphone
let retry = null; // the timer of the next attempt to find a model

// The model -----------------------------------------------------------------------------------------------------------

/** Ask what can be chosen, again and again until the model is there. */
async function connect() {
  clearTimeout(retry);
  try {
    const [models, voices] = await Promise.all([ask("v1/models"), ask("v1/audio/voices")]);
    offer(models.data[0], voices.voices);
    tell("Ready.");
  } catch (error) {
    model = null;
    page.speak.disabled = true;
    page.model.textContent = error.message;
    if (error.status === 401) page.access.open = true;
    else retry = setTimeout(connect, RETRY_MS);
  }
}

function offer(found, voices) {
  model = found;
  page.model.textContent = `${model.id} · ${model.sample_rate / 1000} kHz`;
  page.voice.replaceChildren(...voices.map((voice) => new Option(voice.name, voice.id)));
  page.language.replaceChildren(...model.languages.map((language) => new Option(language)));
  page.voices.hidden = voices.length === 0;
  page.instructing.hidden = !model.accepts_instructions;
  page.cloning.hidden = !model.voice_modes.includes("cloned");
  page.speak.disabled = speaking !== null;
  count();
}

/** Ask the server. Throws an `Error` in words, with the answer's status if there was one. */
async function ask(path, { signal, body } = {}) {
  // A header's characters are bytes; the server compares those of UTF-8.
  const key = String.fromCharCode(...new TextEncoder().encode(page.key.value));
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const post = body && { method: "POST", body: JSON.stringify(body) };
  if (post) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { headers, signal, cache: "no-store", ...post }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached.");
  });
  if (answer.ok) return post ? answer : answer.json();
  const said = await answer.json().catch(() => null);
  const message = said?.error?.message ?? `The server answered ${answer.status} ${answer.statusText}.`;
  throw Object.assign(new Error(message), { status: answer.status });
}

// Speech --------------------------------------------------------------------------------------------------------------

/** What is asked for, from the fields that the model has. */
function request() {
  const body = { input: page.text.value, response_format: "pcm", language: page.language.value };
  Object.assign(body, { stream_format: "sse", timestamps: ["word"] });
  if (!page.instructing.hidden && page.instructions.value.trim()) body.instructions = page.instructions.value;
  if (reference) {
    const said = page.transcript.value.trim();
    Object.assign(body, { ref_audio: reference }, said ? { ref_text: said } : { x_vector_only_mode: true });
  } else if (!page.voices.hidden) {
    body.voice = page.voice.value;
  }
  return body;
}

async function speak() {
  if (speaking || !model) return;
  const pressedMs = performance.now();
  const heard = new Player(model.sample_rate);
  player?.close();
  player = heard;
  speaking = new AbortController();
  begin();
  try {
    const { signal } = speaking;
    const answer = await ask("v1/audio/speech", { signal, body: request() });
    const reason = await hear(events(answer), heard, pressedMs);
    tell("Speaking.");
    await Promise.race([heard.finished(), new Promise((resolve) => signal.addEventListener("abort", resolve))]);
    if (!signal.aborted) mark(null);
    const cut = { length: " It reached its limit.", runaway: " It ran away, and was cut off." }[reason] ?? "";
    tell(`${signal.aborted ? "Stopped after" : "Spoke"} ${heard.durationS.toFixed(1)} s.${signal.aborted ? "" : cut}`);
  } catch (error) {
    heard.stop();
    if (error.name === "AbortError") tell(`Stopped after ${heard.durationS.toFixed(1)} s.`);
    else fail(heard.length ? `The speech was cut off: ${error.message}` : error.message);
  } finally {
    end(heard);
  }
}

/** The events of `answer`, as they come. Throws what the server says went wrong. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const parts = (rest + part.value).split("\n\n");
    rest = parts.pop();
    for (const one of parts) {
      const event = JSON.parse(one.slice("data: ".length));
      if (event.type === "error") throw new Error(event.error.message);
      yield event;
    }
  }
}

/** Play the PCM of `events` as it comes, and say how fast that is. Returns why the speech ended. */
async function hear(events, heard, pressedMs) {
  let reason = "stop";
  for await (const event of events) {
    if (event.type === "speech.words") words.push(...event.words);
    if (event.type === "speech.audio.done") reason = event.finish_reason;
    if (event.type !== "speech.audio.delta") continue;
    const elapsedMs = performance.now() - pressedMs;
    if (!heard.length) {
      page.first.textContent = `${elapsedMs.toFixed(0)} ms`;
      tell("Speaking.");
    }
    heard.feed(Uint8Array.from(atob(event.audio), (byte) => byte.charCodeAt(0)));
    page.rtf.textContent = (elapsedMs / 1000 / heard.durationS).toFixed(2);
    page.audio.textContent = `${heard.durationS.toFixed(1)} s`;
  }
  return reason;
}

/** Be silent at once; the server is told by the request that breaks off. */
function stop() {
  player?.stop();
  speaking?.abort();
}

function begin() {
  page.speak.disabled = page.download.disabled = true;
  page.stop.disabled = false;
  page.error.textContent = "";
  for (const figure of [page.first, page.rtf, page.audio]) figure.textContent = "–";
  [letters, words] = [[...page.text.value], []];
  page.spoken.hidden = true;
  tell("Waiting for the first packet.");
  requestAnimationFrame(draw);
}

function end(heard) {
  speaking = null;
  page.speak.disabled = !model;
  page.stop.disabled = true;
  page.download.disabled = heard.length === 0;
  page.audio.textContent = `${heard.durationS.toFixed(1)} s`;
}

function download() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(wav(player.samples(), player.sampleRate));
  link.download = "speech.wav";
  link.click();
  setTimeout(URL.revokeObjectURL, RETRY_MS, link.href);
}

/** Draw how loud what arrived is, what was played of it in full colour, and again while there is speech. */
function draw() {
  const { width, height } = page.wave;
  const pen = page.wave.getContext("2d");
  const step = width / Math.max(player.bars.length, 100);
  const played = player.played / player.sampleRate / BAR_S;
  pen.clearRect(0, 0, width, height);
  pen.fillStyle = getComputedStyle(page.wave).color;
  player.bars.forEach((peak, index) => {
    pen.globalAlpha = index < played ? 1 : 0.35;
    const tall = Math.max(2, height * Math.sqrt(peak));
    pen.fillRect(index * step, (height - tall) / 2, step * 0.7, tall);
  });
  if (!speaking) return;
  mark(words.findLast((word) => word.start_s * player.sampleRate <= player.played) ?? null);
  requestAnimationFrame(draw);
}

/** Mark `word` in the text that is spoken, or nothing. The text is shown from the first word on. */
function mark(word) {
  page.spoken.hidden = words.length === 0;
  const { start, end } = word ?? { start: letters.length, end: letters.length };
  page.spoken.title = word?.is_estimated ? "estimated" : "";
  page.before.textContent = letters.slice(0, start).join("");
  page.word.textContent = letters.slice(start, end).join("");
  page.after.textContent = letters.slice(end).join("");
}

// A recording to speak like -------------------------------------------------------------------------------------------

async function toggleRecording() {
  if (endRecording) {
    const recorded = endRecording();
    endRecording = null;
    showRecording();
    await take(await recorded);
  } else if (!isAsking) {
    isAsking = true;
    endRecording = await record().finally(() => (isAsking = false));
    showRecording();
  }
}

function showRecording() {
  page.record.textContent = endRecording ? "End the recording" : "Record";
  page.record.classList.toggle("recording", endRecording !== null);
}

/** Use `file` as the reference; the server reads what it becomes here, whatever it was. */
async function take(file) {
  const sound = await asWav(file, REFERENCE_HZ);
  reference = await new Promise((resolve) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.readAsDataURL(sound);
  });
  page.recording.src = URL.createObjectURL(sound);
  page.recording.hidden = page.forget.hidden = false;
  page.voice.disabled = true;
  tell("The recording is the voice.");
}

function forget() {
  reference = null;
  page.file.value = "";
  URL.revokeObjectURL(page.recording.src);
  page.recording.removeAttribute("src");
  page.recording.hidden = page.forget.hidden = true;
  page.voice.disabled = false;
  tell("The recording is removed.");
}

// The page itself -----------------------------------------------------------------------------------------------------

function tell(words) {
  page.status.textContent = words;
}

function fail(words) {
  tell("");
  page.error.textContent = words;
}

function count() {
  page.count.textContent = model ? `${[...page.text.value].length} of ${model.max_characters}` : "";
}

/** `action` as a listener, whose errors are told. */
function telling(action) {
  return (event) => {
    page.error.textContent = "";
    return Promise.resolve(action(event)).catch((error) => fail(error.message));
  };
}

page.form.addEventListener("submit", (event) => {
  event.preventDefault();
  telling(speak)();
});
page.text.addEventListener("input", count);
page.text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) page.form.requestSubmit();
});
page.stop.addEventListener("click", stop);
page.download.addEventListener("click", download);
page.record.addEventListener("click", telling(toggleRecording));
page.file.addEventListener("click", () => (page.file.value = "")); // the same file may be chosen again
page.file.addEventListener("change", telling(() => page.file.files.length && take(page.file.files[0])));
page.forget.addEventListener("click", forget);
page.key.addEventListener("change", () => {
  sessionStorage.setItem("key", page.key.value);
  connect();
});
page.key.value = sessionStorage.getItem("key") ?? "";
connect();
