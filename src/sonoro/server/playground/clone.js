// A recording to speak like: recorded or chosen, heard, described, removed. Knows no server.

import { Recorder, asWav } from "./recorder.js";

const REFERENCE_HZ = 24000;

/** The fields of `page` for a recording. `tell` gets what was done, `fail` errors, `onChange` is called after both. */
export class Clone {
  #reference = null; // a data: URL
  #recorder = new Recorder(() => this.#show());

  constructor(page, { tell, fail, onChange }) {
    Object.assign(this, { page, tell, onChange });
    const telling = (action) => () => action().catch((error) => fail(error.message));
    page.record.addEventListener("click", telling(() => this.#record()));
    page.file.addEventListener("click", () => (page.file.value = "")); // the same file may be chosen again
    page.file.addEventListener("change", telling(async () => page.file.files.length && this.#take(page.file.files[0])));
    page.forget.addEventListener("click", () => this.#forget());
  }

  get isSet() {
    return this.#reference !== null;
  }

  /** The fields of a request. */
  get fields() {
    if (!this.#reference) return {};
    const said = this.page.transcript.value.trim();
    return { ref_audio: this.#reference, ...(said ? { ref_text: said } : { x_vector_only_mode: true }) };
  }

  async #record() {
    const recorded = await this.#recorder.toggle();
    if (recorded) await this.#take(recorded);
  }

  /** Use `file` as the reference; the server reads what it becomes here, whatever it was. */
  async #take(file) {
    const sound = await asWav(file, REFERENCE_HZ);
    this.#reference = await new Promise((resolve) => {
      const reader = new FileReader();
      reader.addEventListener("load", () => resolve(reader.result));
      reader.readAsDataURL(sound);
    });
    URL.revokeObjectURL(this.page.recording.src);
    this.page.recording.src = URL.createObjectURL(sound);
    this.#show();
    this.tell("The recording is the voice.");
    this.onChange();
  }

  #forget() {
    this.#reference = null;
    URL.revokeObjectURL(this.page.recording.src);
    this.page.recording.removeAttribute("src");
    this.#show();
    this.tell("The recording is removed.");
    this.onChange();
  }

  #show() {
    const { page } = this;
    const { state } = this.#recorder;
    page.record.textContent = { idle: "Record", asking: "Cancel", recording: "End the recording" }[state];
    page.record.classList.toggle("recording", state === "recording");
    page.recording.hidden = page.forget.hidden = page.said.hidden = !this.#reference;
  }
}
