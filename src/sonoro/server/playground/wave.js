// Draws how loud a take is, what was played of it in the colour of sound. Knows no server.

import { PEAK_S } from "./take.js";

const STEP = 5; // CSS pixels from bar to bar
const WIDE = 3;
const QUIET = 0.1; // a take that is quieter than this is drawn lower
const BEND = 0.8;

/** Draw `take` on `canvas`, played until sample `position`, over `totalS` seconds. */
export function drawWave(canvas, take, position, totalS) {
  const { clientWidth, clientHeight } = canvas;
  const scale = window.devicePixelRatio || 1;
  const [width, height] = [Math.round(clientWidth * scale), Math.round(clientHeight * scale)];
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d");
  const style = getComputedStyle(canvas);
  const [played, coming] = [style.color, style.borderTopColor];
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, clientWidth, clientHeight);
  const bars = Math.floor(clientWidth / STEP);
  const playedS = take ? position / take.rate : 0;
  const most = take ? take.peaks.reduce((high, peak) => Math.max(high, peak), QUIET) : QUIET;
  for (let bar = 0; bar < bars; bar++) {
    const [fromS, toS] = [(bar / bars) * totalS, ((bar + 1) / bars) * totalS];
    const peak = take ? loudest(take.peaks, fromS, toS) : null;
    const tall = peak === null ? WIDE : Math.max(WIDE, clientHeight * (peak / most) ** BEND);
    pen.fillStyle = peak !== null && fromS < playedS ? played : coming;
    pen.beginPath();
    pen.roundRect(bar * STEP, (clientHeight - tall) / 2, WIDE, tall, WIDE / 2);
    pen.fill();
  }
}

/** The loudest peak between two times; null if none has come. */
function loudest(peaks, fromS, toS) {
  const from = Math.floor(fromS / PEAK_S);
  if (from >= peaks.length) return null;
  const to = Math.max(Math.ceil(toS / PEAK_S), from + 1);
  return Math.max(...peaks.slice(from, to));
}
