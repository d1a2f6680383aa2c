// Changes the tempo of speech at the same pitch, by overlapping pieces where they are most alike (WSOLA).

const HOP_S = 0.02;
const REACH_S = 0.01;
const STRIDE = 4; // of the samples that are compared

/** Reads `take` from sample `start` on, at `speed` times the tempo. */
export class Stretch {
  #steps = 0;
  #end = 0; // where, in the take, the piece before would go on
  #hop;
  #reach;

  constructor(take, start, speed) {
    Object.assign(this, { take, start, speed });
    this.#hop = Math.round(HOP_S * take.rate);
    this.#reach = Math.round(REACH_S * take.rate);
    this.#end = start;
  }

  /** The sample of the take that is read next. */
  get at() {
    return Math.round(this.start + this.#steps * this.#hop * this.speed);
  }

  /** The next 20 ms as played; null if more of the take must come first, or it has ended. */
  next() {
    const { take, at } = this;
    const needed = at + this.#reach + 2 * this.#hop;
    if (at >= take.length || (needed > take.length && !take.isWhole)) return null;
    const before = take.floats(this.#end, this.#end + this.#hop);
    const from = this.#steps ? this.#mostAlike(before, at) : at;
    const after = take.floats(from, from + this.#hop);
    const mixed = before.map((sample, i) => {
      const share = (1 - Math.cos((Math.PI * (i + 0.5)) / this.#hop)) / 2;
      return sample * (1 - share) + after[i] * share;
    });
    this.#end = from + this.#hop;
    this.#steps += 1;
    return mixed;
  }

  #mostAlike(before, at) {
    const low = Math.max(at - this.#reach, 0);
    const around = this.take.floats(low, at + this.#reach + this.#hop);
    let [best, most] = [at, -Infinity];
    for (let shift = 0; shift + this.#hop <= around.length; shift += STRIDE) {
      let [product, power] = [0, 1e-6];
      for (let i = 0; i < this.#hop; i += STRIDE) {
        product += before[i] * around[shift + i];
        power += around[shift + i] ** 2;
      }
      const alike = product / Math.sqrt(power);
      if (alike > most) [best, most] = [low + shift, alike];
    }
    return best;
  }
}
