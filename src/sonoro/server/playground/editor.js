// What is to be spoken: a text in one voice, or lines with a voice each; samples, and text files that are dropped.

import { SAMPLES } from "./samples.js";
import { element, icons, named } from "./voices.js";

const LARGEST_FILE = 1_000_000;
const MOST_LINES = 256;
const BETWEEN = [..."[pause:300ms]\n"].length; // what the server puts between two lines, and counts

/** The fields of `page` for the text. `onChange` is called when something is typed, chosen or read. */
export class Editor {
  #voices = [];

  constructor(page, onChange) {
    Object.assign(this, { page, onChange });
    for (const mode of [page.single, page.each]) mode.addEventListener("change", () => this.#switch());
    page.add.addEventListener("click", () => this.#insert(this.#rows.length).focus());
    for (const button of page.samples.querySelectorAll("button")) {
      button.addEventListener("click", () => this.#fill(SAMPLES[button.dataset.sample]));
    }
    page.form.addEventListener("input", onChange);
    page.lines.addEventListener("keydown", (event) => this.#typed(event));
  }

  /** Offer `voices` for lines; without two of them there are none. */
  offer(voices) {
    this.#voices = voices;
    this.page.modes.hidden = voices.length < 2;
    if (voices.length < 2) this.page.single.checked = true;
    for (const select of this.page.lines.querySelectorAll("select")) {
      const chosen = select.value;
      select.replaceChildren(...this.#options());
      if (voices.some(({ id }) => id === chosen)) select.value = chosen;
    }
    this.#switch();
  }

  get isLines() {
    return this.page.each.checked;
  }

  /** The lines that say something: { voice, text }. */
  get lines() {
    const lines = this.#rows.map((row) => {
      return { voice: row.querySelector("select").value, text: wellFormed(row.querySelector("textarea").value.trim()) };
    });
    return lines.filter(({ text }) => text);
  }

  /** The text as it is shown while it is spoken. */
  get text() {
    return this.isLines ? this.lines.map(({ text }) => text).join("\n") : wellFormed(this.page.text.value);
  }

  /** Characters, as the server counts them: code points, and what it puts around lines. */
  get count() {
    if (!this.isLines) return [...this.text].length;
    const { lines } = this;
    const tagged = lines.map(({ voice, text }) => [...`[voice:${voice}][rate:1]${text}`].length);
    return tagged.reduce((sum, length) => sum + length, Math.max(lines.length - 1, 0) * BETWEEN);
  }

  /** Take the text of `file`. Throws what to tell the user. */
  async read(file) {
    if (file.size > LARGEST_FILE) throw new Error(`${file.name} is larger than a megabyte: cut it first.`);
    const bytes = await file.arrayBuffer();
    let text;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    } catch {
      text = "\0";
    }
    if (text.includes("\0")) throw new Error(`${file.name} is not a text file in UTF-8.`);
    this.#fill(text.replace(/\r\n?/g, "\n").trim());
  }

  get #rows() {
    return [...this.page.lines.children];
  }

  /** Show `script`, a text or an array of lines; a text goes where text is typed now. */
  #fill(script) {
    const isLines = Array.isArray(script) && this.#voices.length > 1;
    const lines = Array.isArray(script) ? script : script.split("\n").filter((line) => line.trim());
    if (isLines || (this.isLines && !Array.isArray(script) && lines.length > 1)) {
      this.page.each.checked = true;
      this.page.lines.replaceChildren();
      lines.slice(0, MOST_LINES).forEach((line, index) => this.#insert(index, line));
    } else {
      this.page.single.checked = true;
      this.#type(lines === script ? lines.join("\n\n") : script);
    }
    this.#switch();
  }

  /** Replace the text as typing does, so that it can be undone. */
  #type(text) {
    const { text: field } = this.page;
    this.page.sheet.hidden = false;
    field.hidden = false;
    field.focus();
    field.select();
    // There is no other way to keep the history of the field.
    if (!document.execCommand("insertText", false, text)) field.value = text;
    field.setSelectionRange(0, 0);
    field.scrollTop = 0;
  }

  /** Show the fields of the mode that is chosen, with what the other held if they are empty. */
  #switch() {
    const { page, isLines } = this;
    page.text.hidden = isLines;
    page.turns.hidden = !isLines;
    if (isLines && !this.#rows.length) {
      const lines = page.text.value.split("\n").filter((line) => line.trim());
      (lines.length ? lines : [""]).slice(0, MOST_LINES).forEach((line, index) => this.#insert(index, line));
    }
    this.onChange();
  }

  /** A new line at `index`; returns its field. */
  #insert(index, text = "") {
    const row = element("li");
    const select = element("select");
    select.append(...this.#options());
    if (this.#voices.length) select.value = this.#voices[index % 2 % this.#voices.length].id;
    const field = element("textarea", { rows: 1, value: text });
    const remove = element("button", { type: "button", className: "round" });
    remove.append(...icons("remove"));
    remove.addEventListener("click", () => this.#remove(row));
    row.append(select, field, remove);
    this.page.lines.insertBefore(row, this.#rows[index] ?? null);
    this.#number();
    this.onChange();
    return field;
  }

  #remove(row) {
    const at = this.#rows.indexOf(row);
    row.remove();
    if (!this.#rows.length) this.#insert(0);
    this.#rows[Math.max(at - 1, 0)].querySelector("textarea").focus();
    this.#number();
    this.onChange();
  }

  #number() {
    this.#rows.forEach((row, index) => {
      row.querySelector("select").setAttribute("aria-label", `Voice of line ${index + 1}`);
      row.querySelector("textarea").setAttribute("aria-label", `Line ${index + 1}`);
      row.querySelector("button").setAttribute("aria-label", `Remove line ${index + 1}`);
    });
    this.page.add.disabled = this.#rows.length >= MOST_LINES;
  }

  /** Enter begins a new line, Backspace in an empty one removes it. */
  #typed(event) {
    const row = event.target.closest("li");
    if (event.target.tagName !== "TEXTAREA" || event.ctrlKey || event.metaKey || event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey && this.#rows.length < MOST_LINES) {
      event.preventDefault();
      this.#insert(this.#rows.indexOf(row) + 1).focus();
    } else if (event.key === "Backspace" && !event.target.value && this.#rows.length > 1) {
      event.preventDefault();
      this.#remove(row);
    }
  }

  #options() {
    return this.#voices.map((voice) => new Option(named(voice), voice.id));
  }
}

/** Half characters, which no encoding has, are replaced. */
function wellFormed(text) {
  return text.replace(/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, "\ufffd");
}

/** The pronunciations in `text`, lines of `word = how it is said`. Throws what to tell the user. */
export function pronunciations(text) {
  const rules = {};
  text.split("\n").forEach((line, index) => {
    if (!line.trim()) return;
    const [word, ...said] = line.split("=");
    if (!word.trim() || !said.join("=").trim()) {
      throw new Error(`Pronunciations, line ${index + 1}: write it as word = how it is said.`);
    }
    rules[word.trim()] = said.join("=").trim();
  });
  return Object.keys(rules).length ? rules : null;
}
