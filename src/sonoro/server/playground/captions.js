// Captions from word times: SubRip. Knows no server and no element of the page.

const LINE = 42;
const LINES = 2;
const LONGEST_S = 7;
const SENTENCE_END = /[.!?。！？…]["'”’)\]]*\s*$/;
const MARKUP = /<[^<>]*>|\[[^[\]]*\]/g;

/** The words of `take` as a SubRip file, cut at sentence ends or where a caption is full. */
export function srt(take) {
  const groups = [];
  let group = [];
  take.words.forEach((word, index) => {
    const first = group[0] ?? word;
    const isLong = word.end_s - first.start_s > LONGEST_S;
    if (group.length && (isLong || lines(said(take, first, word, index)).length > LINES)) {
      groups.push(group);
      group = [];
    }
    group.push({ ...word, index });
    if (SENTENCE_END.test(said(take, group[0], word, index))) groups.push(group.splice(0));
  });
  if (group.length) groups.push(group);
  const blocks = groups.map((words, number) => {
    const [first, last] = [words[0], words.at(-1)];
    const shown = lines(said(take, first, last, last.index)).join("\n");
    return `${number + 1}\n${clock(first.start_s)} --> ${clock(last.end_s)}\n${shown}\n`;
  });
  return blocks.join("\n");
}

/** The text from word `first` to `last`, which is number `index`, with the punctuation behind it. */
function said(take, first, last, index) {
  const end = take.words[index + 1]?.start ?? take.letters.length;
  const tail = take.letters.slice(last.end, end).join("").split(/\s/)[0];
  return (take.letters.slice(first.start, last.end).join("") + tail).replace(MARKUP, " ").replace(/\s+/g, " ").trim();
}

function lines(text) {
  const made = [""];
  for (const word of text.split(" ")) {
    const joined = made.at(-1) ? `${made.at(-1)} ${word}` : word;
    if (joined.length <= LINE) made[made.length - 1] = joined;
    else made.push(word);
  }
  return made.filter(Boolean);
}

function clock(seconds) {
  const ms = Math.round(1000 * seconds);
  const two = (number) => String(number).padStart(2, "0");
  const [hours, minutes] = [Math.floor(ms / 3_600_000), Math.floor(ms / 60_000) % 60];
  return `${two(hours)}:${two(minutes)}:${two(Math.floor(ms / 1000) % 60)},${String(ms % 1000).padStart(3, "0")}`;
}
