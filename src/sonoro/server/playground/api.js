// Asks the speech API beside the page. Knows no element of the page.

const CONTROLS = /[\u0000-\u001f\u007f]/;
let key = "";

/** Send `given` as the key of every request from now on. Throws what to tell the user of a key that no header holds. */
export function useKey(given) {
  key = "";
  if (CONTROLS.test(given.trim())) {
    throw Object.assign(new Error("A key is one line: remove the line breaks or tabs in it."), { status: 401 });
  }
  key = given.trim();
}

/** The answer to a request for `path`. Throws an `Error` in words, with the answer's status if there was one. */
export async function ask(path, { signal, body, pcm } = {}) {
  // A header's characters are bytes; the server compares those of UTF-8, whatever the key is written in.
  const bytes = String.fromCharCode(...new TextEncoder().encode(key));
  const headers = key ? { Authorization: `Bearer ${bytes}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const sent = body || pcm ? { method: "POST", body: body ? JSON.stringify(body) : pcm } : {};
  const answer = await fetch(path, { headers, signal, cache: "no-store", ...sent }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached. Is it still running?");
  });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => null);
  const message = said?.error?.message ?? `The server answered ${answer.status} ${answer.statusText}.`;
  throw Object.assign(new Error(message), { status: answer.status });
}

/** The events of `answer`, as they come, each with the bytes it took. Throws what the server says went wrong. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const parts = (rest + part.value).split("\n\n");
    rest = parts.pop();
    for (const one of parts) {
      const event = JSON.parse(one.slice("data: ".length));
      if (event.type === "error") throw new Error(event.error.message);
      yield { ...event, bytes: one.length + 2 };
    }
  }
}
