// The text that is spoken, word by word: lights the one that is heard, and tells which was pressed. Knows no server.

/** Shows takes in `element`. `onPick` gets the word that was pressed. */
export class Transcript {
  #take = null;
  #spans = [];
  #shown = 0; // letters that are in the spans and between them
  #rest = document.createTextNode("");
  #lit = -1;

  constructor(element, onPick) {
    this.element = element;
    element.addEventListener("click", ({ target }) => {
      const index = this.#spans.indexOf(target);
      if (index >= 0) onPick(this.#take.words[index]);
    });
  }

  show(take) {
    [this.#take, this.#spans, this.#shown, this.#lit] = [take, [], 0, -1];
    this.#rest = document.createTextNode(take.text);
    this.element.replaceChildren(this.#rest);
    this.element.scrollTop = 0;
    this.update();
  }

  /** Put in words that became known since. */
  update() {
    const { words, letters } = this.#take;
    for (const word of words.slice(this.#spans.length)) {
      const span = document.createElement("span");
      span.textContent = letters.slice(word.start, word.end).join("");
      if (word.is_estimated) span.title = "time estimated";
      this.#rest.before(letters.slice(this.#shown, word.start).join(""), span);
      this.#shown = word.end;
      this.#spans.push(span);
    }
    this.#rest.data = letters.slice(this.#shown).join("");
    this.element.classList.toggle("timed", words.length > 0);
  }

  /** Light the word of that index, and scroll it into view; none for -1. Words before it are marked as heard. */
  light(index) {
    if (index === this.#lit) return;
    const [low, high] = [Math.min(index, this.#lit), Math.max(index, this.#lit)];
    for (let at = Math.max(low, 0); at <= high && at < this.#spans.length; at++) {
      this.#spans[at].className = at < index ? "heard" : at === index ? "lit" : "";
    }
    this.#lit = index;
    const span = this.#spans[index];
    if (!span) return;
    const box = this.element;
    const top = span.offsetTop - box.offsetTop;
    const isSeen = top >= box.scrollTop && top + span.offsetHeight <= box.scrollTop + box.clientHeight;
    if (!isSeen) box.scrollTo({ top: top - box.clientHeight / 3, behavior: calm.matches ? "auto" : "smooth" });
  }
}

const calm = matchMedia("(prefers-reduced-motion: reduce)");
