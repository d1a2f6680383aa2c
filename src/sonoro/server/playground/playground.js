// The page: what is typed goes to the speech API; what comes back is heard, shown and kept.

import { ask, useKey } from "./api.js";
import { srt } from "./captions.js";
import { Clone } from "./clone.js";
import { Editor, pronunciations } from "./editor.js";
import { History } from "./history.js";
import { Panel } from "./panel.js";
import { Player } from "./player.js";
import * as snippets from "./snippets.js";
import { receive, soundFields, takeOf } from "./speech.js";
import { wav } from "./take.js";
import { Voices, named } from "./voices.js";

const RETRY_MS = 1000;
const KEPT_MS = 60_000; // how long a file that is being saved is held
const FILE_HZ = [8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000];

const page = Object.fromEntries([...document.querySelectorAll("[id]")].map((element) => [element.id, element]));

let model = null; // what /v1/models says of it
let making = null; // the AbortController of speech that is being made
let retry = 0; // the timer of the next attempt to find a model
const ends = new WeakMap(); // what to say when a take has been heard

const player = new Player();
const panel = new Panel(page, player);
const voices = new Voices(page.cards, { onHear: () => player.pause(), onChange: () => page.error.replaceChildren() });
const editor = new Editor(page, refresh);
const clone = new Clone(page, { tell, fail, onChange: refresh });
const history = new History(page.takes, open);

// The model -----------------------------------------------------------------------------------------------------------

/** Ask what can be chosen, again and again until the model is there. */
async function connect() {
  clearTimeout(retry);
  try {
    useKey(page.key.value);
    const asked = await Promise.all([ask("v1/models"), ask("v1/audio/voices")]);
    const [models, listed] = await Promise.all(asked.map((answer) => answer.json()));
    offer(models.data[0], listed);
    if (!player.take) tell("Ready.");
  } catch (error) {
    model = null;
    page.model.textContent = error.message;
    if (error.status === 401) page.access.open = true;
    else retry = setTimeout(connect, RETRY_MS);
  }
  page.header.classList.toggle("ready", model !== null);
  refresh();
}

function offer(found, { voices: listed, uploaded_voices: uploaded }) {
  model = found;
  page.model.textContent = `${model.id} · ${model.sample_rate / 1000} kHz`;
  voices.show(model.id, listed);
  page.voices.hidden = listed.length === 0;
  const own = new Set(uploaded.map(({ name }) => name));
  editor.offer(listed.filter(({ id }) => !own.has(id)));
  page.language.replaceChildren(...model.languages.map((language) => new Option(language)));
  page.languages.hidden = model.languages.length < 3; // auto and the only one
  page.instructing.hidden = !model.accepts_instructions;
  page.cloning.hidden = !model.voice_modes.includes("cloned");
  page.uncloned.hidden = !page.cloning.hidden;
}

// Speech --------------------------------------------------------------------------------------------------------------

/** What is asked for, from the fields that the model has. Throws what to tell the user. */
async function request() {
  const body = {};
  const said = pronunciations(page.rules.value);
  if (editor.isLines) body.inputs = editor.lines;
  else body.input = editor.text;
  if (!clone.isSet && !editor.isLines && voices.value) body.voice = voices.value;
  if (!page.languages.hidden) body.language = page.language.value;
  if (!page.instructing.hidden && page.instructions.value.trim()) body.instructions = page.instructions.value;
  if (said) body.lexicons = [said];
  if (page.seed.value) body.seed = Number(page.seed.value);
  if (!editor.isLines) Object.assign(body, clone.fields);
  return { ...body, ...(await soundFields(page.sound.value, model.sample_rate)) };
}

function speaker() {
  if (editor.isLines) {
    const cast = new Set(editor.lines.map(({ voice }) => voice));
    return voices.voices.filter(({ id }) => cast.has(id)).map(named).join(", ");
  }
  if (clone.isSet) return "Your recording";
  const voice = voices.voices.find(({ id }) => id === voices.value);
  return voice ? named(voice) : model.id;
}

async function speak() {
  if (page.speak.disabled) return;
  const { signal } = (making = new AbortController());
  let take = null;
  try {
    const { text } = editor;
    take = takeOf({ text, speaker: speaker(), body: await request(), rate: model.sample_rate });
    voices.stop();
    show(take);
    clearFigures(take);
    player.play();
    page.player.scrollIntoView({ block: "nearest", behavior: "smooth" });
    refresh();
    const reason = await receive(take, { signal, note: (found) => figure(take, found), onWords: () => shows(take) && panel.addWords() });
    const cut = { length: " It reached its limit.", runaway: " It ran away, and was cut off." }[reason] ?? "";
    finish(take, "Spoke", take.length, cut);
  } catch (error) {
    const isStop = error.name === "AbortError";
    if (take) finish(take, isStop ? "Stopped after" : "Cut off after", isStop ? take.heard : take.length);
    if (isStop) tell(ends.get(take));
    else fail(take?.length ? `The speech was cut off: ${error.message}` : error.message);
  } finally {
    making = null;
    if (take) figure(take, {});
    if (take?.length) history.add(take);
    if (take && !take.length && shows(take)) player.pause();
    refresh();
  }
}

/** Keep `length` samples of `take`, and note what to say once they have been heard. */
function finish(take, said, length, more = "") {
  // First: to finish a take that waits for more ends it at once.
  ends.set(take, `${said} ${(length / take.rate).toFixed(1)} s.${more}`);
  take.finish(length);
}

/** Be silent at once, and keep what was heard; the server is told by the request that breaks off. */
function stop() {
  const wasRunning = player.isRunning;
  player.pause();
  voices.stop();
  making?.abort();
  if (!making && wasRunning) tell(`Stopped after ${(player.position / player.take.rate).toFixed(1)} s.`);
}

function shows(take) {
  return player.take === take;
}

function show(take) {
  player.open(take);
  panel.open(take);
}

/** Hear `take` again. */
function open(take) {
  page.error.replaceChildren();
  voices.stop();
  show(take);
  history.select(take);
  player.play();
  refresh();
}

player.addEventListener("change", () => {
  const { state, take, position } = player;
  page.stop.disabled = !making && !player.isRunning;
  if (page.error.textContent) return;
  if (state === "buffering" && !take.length) tell("Waiting for the first packet.");
  else if (state === "buffering" && position && !take.isWhole) tell("Buffering …");
  else if (state === "playing") tell("Speaking.");
  else if (state === "ended") tell(ends.get(take));
  else if (state === "paused") tell("Paused.");
  if (take) page.stalls.textContent = player.stalls;
});

// Figures for engineers -----------------------------------------------------------------------------------------------

function clearFigures(take) {
  for (const name of ["first", "rtf", "audio", "need", "stalls"]) page[name].textContent = "–";
  page.coding.textContent = take.body.response_format;
}

/** Show what was measured of `take`, if it is the one that is shown. */
function figure(take, { firstMs, elapsedMs, bytes }) {
  if (!shows(take)) return;
  if (firstMs) page.first.textContent = `${firstMs.toFixed(0)} ms`;
  if (elapsedMs) page.rtf.textContent = (elapsedMs / 1000 / take.durationS).toFixed(2);
  if (bytes) page.need.textContent = `${((bytes * 8) / 1000 / take.durationS).toFixed(0)} kbit/s`;
  page.audio.textContent = `${take.durationS.toFixed(1)} s`;
  page.stalls.textContent = player.stalls;
}

// Files and code ------------------------------------------------------------------------------------------------------

/** Save what the player holds as a file of `kind`. */
async function save(kind) {
  const { take } = player;
  const rate = FILE_HZ.includes(model?.sample_rate) ? model.sample_rate : 48_000;
  if (kind === "srt" && !take.words.length) throw new Error("This model tells no word times, so there are no captions.");
  if (kind === "srt") give(new Blob([srt(take)], { type: "text/plain" }), kind);
  else if (kind === "wav") give(wav(await take.pcm(rate), rate), kind);
  else give(await (await ask(`playground/${kind}?rate=${rate}`, { pcm: await take.pcm(rate) })).blob(), kind);
  tell(`Saved speech.${kind}.`);
}

function give(file, kind) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(file);
  link.download = `speech.${kind}`;
  link.click();
  setTimeout(URL.revokeObjectURL, KEPT_MS, link.href);
}

/** Copy the request behind the player, or else the one that Speak would send, as code. */
async function copy(kind, label) {
  const body = player.take?.body ?? (await request());
  const facts = { url: new URL(".", location.href).href, model: model?.id ?? "tts-1", hasKey: Boolean(page.key.value) };
  await toClipboard(snippets[kind](body, facts));
  tell(`Copied as ${label}.`);
}

async function toClipboard(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  // On a page from http:// there is no other way.
  const field = Object.assign(document.createElement("textarea"), { value: text, className: "unseen" });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

// The page itself -----------------------------------------------------------------------------------------------------

function tell(words) {
  page.status.textContent = words;
}

function fail(words) {
  tell("");
  page.error.textContent = words;
}

/** Bring counter and buttons up to date; an old error goes. */
function refresh() {
  const [count, limit] = [editor.count, model?.max_characters ?? Infinity];
  const over = count - limit;
  const number = (value) => value.toLocaleString("en");
  page.count.textContent = model ? `${number(count)} of ${number(limit)}${over > 0 ? `: ${number(over)} too many` : ""}` : "";
  page.count.classList.toggle("over", over > 0);
  page.speak.disabled = !model || making !== null || over > 0 || !editor.text.trim();
  page.stop.disabled = !making && !player.isRunning;
  voices.isFixed = clone.isSet || editor.isLines;
  page.unchosen.hidden = !editor.isLines;
}

/** `action` as a listener; an old error goes, and its own is told. */
function telling(action) {
  return (event) => {
    page.error.replaceChildren();
    return Promise.resolve(action(event)).catch((error) => fail(error.message));
  };
}

/** Keys for the whole page, where nothing else takes them. */
function pressed(event) {
  const { target, key } = event;
  if (event.defaultPrevented || event.isComposing) return;
  if (key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    page.form.requestSubmit(page.speak.disabled ? null : page.speak);
  } else if (key === "Escape") {
    stop();
  } else if (!target.closest("input, textarea, select, button, summary, audio, label") && !event.ctrlKey && !event.altKey && !event.metaKey) {
    const action = { " ": () => player.toggle(), ArrowLeft: () => panel.step(-1), ArrowRight: () => panel.step(1) }[key];
    if (!action || !player.take) return;
    event.preventDefault();
    action();
  }
}

async function dropped(event) {
  event.preventDefault();
  page.sheet.classList.remove("over");
  const { files } = event.dataTransfer;
  if (files.length) await editor.read(files[0]);
}

page.form.addEventListener("submit", (event) => {
  event.preventDefault();
  telling(speak)();
});
document.addEventListener("input", () => page.error.replaceChildren());
page.stop.addEventListener("click", telling(stop));
page.cards.addEventListener("failure", ({ detail }) => fail(detail));
for (const button of page.saves.querySelectorAll("button")) {
  button.addEventListener("click", telling(() => save(button.dataset.kind)));
}
for (const button of page.copies.querySelectorAll("button")) {
  button.addEventListener("click", telling(() => copy(button.dataset.kind, button.textContent)));
}
page.textfile.addEventListener("click", () => (page.textfile.value = ""));
page.textfile.addEventListener("change", telling(async () => page.textfile.files.length && editor.read(page.textfile.files[0])));
page.sheet.addEventListener("dragover", (event) => {
  event.preventDefault();
  page.sheet.classList.add("over");
});
page.sheet.addEventListener("dragleave", () => page.sheet.classList.remove("over"));
page.sheet.addEventListener("drop", telling(dropped));
document.addEventListener("keydown", pressed);
page.key.addEventListener("change", () => {
  sessionStorage.setItem("key", page.key.value);
  connect();
});
page.key.value = sessionStorage.getItem("key") ?? "";
connect();
