// What was spoken since the page was opened: kept in memory, heard again without being made again.

import { clock } from "./panel.js";
import { element } from "./voices.js";

const MOST_TAKES = 30;
const MOST_BYTES = 150_000_000;

/** The takes, newest first, in `list`. `onPick` gets the one that was pressed. */
export class History {
  #takes = [];

  constructor(list, onPick) {
    Object.assign(this, { list, onPick });
  }

  add(take) {
    this.#takes.unshift(take);
    while (this.#takes.length > 1 && (this.#takes.length > MOST_TAKES || this.#bytes > MOST_BYTES)) this.#takes.pop();
    this.list.prepend(this.#item(take));
    while (this.list.children.length > this.#takes.length) this.list.lastChild.remove();
    this.select(take);
  }

  /** Mark `take` as the one in the player. */
  select(take) {
    [...this.list.children].forEach((item, index) => {
      if (this.#takes[index] === take) item.firstChild.setAttribute("aria-current", "true");
      else item.firstChild.removeAttribute("aria-current");
    });
  }

  get #bytes() {
    return this.#takes.reduce((sum, take) => sum + take.size, 0);
  }

  #item(take) {
    const button = element("button", { type: "button" });
    const at = take.madeAt.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
    for (const words of [take.text.replace(/\s+/g, " ").slice(0, 160), take.speaker, clock(take.durationS), at]) {
      button.append(element("span", { textContent: words }), " ");
    }
    button.addEventListener("click", () => this.onPick(take));
    const item = element("li");
    item.append(button);
    return item;
  }
}
