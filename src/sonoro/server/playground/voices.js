// Cards of voices: to choose one, and to hear each with one press.

import { ask } from "./api.js";

const PREVIEWS = { builtin: ["nora", "miles", "edith", "hugh"] }; // in the package, by model
const SENTENCE = "Hello. This is how I sound when I read to you.";

/** The cards in `box`. `onHear` is called before a preview sounds, `onChange` when a voice is chosen. */
export class Voices {
  #model = null;
  #context = null;
  #sounds = new Map(); // decoded previews by voice
  #source = null;
  #sounding = null; // the button of the preview that sounds, or is being fetched

  constructor(box, { onHear, onChange }) {
    Object.assign(this, { box, onHear });
    box.addEventListener("change", onChange);
  }

  /** Offer `voices` of `model`: { id, name } and, as far as known, accent, adjectives, description. */
  show(model, voices) {
    const chosen = this.value;
    this.#model = model;
    this.voices = voices;
    this.box.replaceChildren(...voices.map((voice, index) => this.#card(voice, index)));
    const input = this.#inputs.find(({ value }) => value === chosen) ?? this.#inputs[0];
    if (input) input.checked = true;
  }

  get value() {
    return this.#inputs.find((input) => input.checked)?.value;
  }

  get #inputs() {
    return [...this.box.querySelectorAll("input")];
  }

  /** Let nobody choose, or again; previews can be heard all the same. */
  set isFixed(isFixed) {
    this.box.classList.toggle("fixed", isFixed);
    for (const input of this.#inputs) input.disabled = isFixed;
  }

  /** Be silent. */
  stop() {
    this.#source?.stop();
    this.#source = null;
    this.#light(null);
  }

  #card(voice, index) {
    const name = named(voice);
    const card = element("div", { className: "voice" });
    const input = element("input", { type: "radio", name: "voice", id: `voice-${index}`, value: voice.id });
    const label = element("label", { htmlFor: input.id });
    label.append(element("strong", { textContent: name }));
    for (const words of [voice.accent, told(voice)]) if (words) label.append(element("span", { textContent: words }));
    const button = element("button", { type: "button", className: "round hear" });
    button.setAttribute("aria-label", `Hear ${name}`);
    button.append(...icons("play", "pause"));
    button.addEventListener("click", () => this.#hear(voice, button));
    card.append(input, label, button);
    return card;
  }

  async #hear(voice, button) {
    const isStop = this.#sounding === button;
    this.stop();
    if (isStop) return;
    this.onHear();
    this.#light(button);
    this.#context ??= new AudioContext();
    this.#context.resume();
    try {
      const buffer = this.#sounds.get(voice.id) ?? (await this.#fetch(voice));
      this.#sounds.set(voice.id, buffer);
      if (this.#sounding !== button) return; // another was pressed meanwhile
      this.#source = new AudioBufferSourceNode(this.#context, { buffer });
      this.#source.connect(this.#context.destination);
      this.#source.addEventListener("ended", () => this.#sounding === button && this.#light(null));
      this.#source.start();
    } catch (error) {
      if (this.#sounding === button) this.#light(null);
      this.box.dispatchEvent(new CustomEvent("failure", { detail: error.message }));
    }
  }

  async #fetch(voice) {
    const isPacked = PREVIEWS[this.#model]?.includes(voice.id);
    const body = { input: SENTENCE, voice: voice.id, response_format: "mp3" };
    const answer = isPacked ? await ask(`playground/preview-${voice.id}.mp3`) : await ask("v1/audio/speech", { body });
    return this.#context.decodeAudioData(await answer.arrayBuffer());
  }

  #light(button) {
    this.#sounding?.classList.remove("on");
    this.#sounding = button;
    button?.classList.add("on");
  }
}

/** The name of a voice as shown. */
export function named({ name }) {
  return name.replace(/_/g, " ").replace(/(^|\s)\S/g, (letter) => letter.toUpperCase());
}

function told({ adjectives, description }) {
  return Array.isArray(adjectives) ? adjectives.join(", ") : (adjectives ?? description);
}

export function element(kind, properties = {}) {
  return Object.assign(document.createElement(kind), properties);
}

/** Copies of the page's icons of those names. */
export function icons(...names) {
  return names.map((name) => document.getElementById(`icon-${name}`).content.cloneNode(true));
}
