// What was asked for, as code to run: curl, Python's standard library, OpenAI's client. Knows no element of the page.

const OPENAI = ["model", "voice", "input", "instructions", "response_format"];
const RECORDING = "me.wav"; // where a snippet reads the recording that the page holds

/** `body` for a file: without what the page asks for to play it. */
function fileBody(body, model) {
  const { stream_format, timestamps, bit_rate, ref_audio, ...rest } = body;
  return { model, ...rest, response_format: "mp3", ...(ref_audio ? { ref_audio: RECORDING } : {}) };
}

export function curl(body, { url, model, hasKey }) {
  const made = fileBody(body, model);
  const json = JSON.stringify(made, null, 2);
  const key = hasKey ? ` -H "Authorization: Bearer $SONORO_API_KEY"` : "";
  const start = `curl ${url}v1/audio/speech -H 'Content-Type: application/json'${key} -o speech.mp3 -d @- `;
  if (!body.ref_audio) return `${start}<<'JSON'\n${json}\nJSON\n`;
  const safe = json.replace(/[\\$`]/g, "\\$&");
  const inline = safe.replace(`"${RECORDING}"`, `"data:audio/wav;base64,$(base64 < ${RECORDING} | tr -d '\\n')"`);
  return `${start}<<JSON\n${inline}\nJSON\n`;
}

export function python(body, { url, model, hasKey }) {
  const key = hasKey ? `, "Authorization": "Bearer " + os.environ["SONORO_API_KEY"]` : "";
  const modules = [...(body.ref_audio ? ["base64"] : []), "json", ...(hasKey ? ["os"] : []), "urllib.request"];
  return `${modules.map((name) => `import ${name}`).join("\n")}

body = ${literal(fileBody(body, model), "")}
${recording(body)}request = urllib.request.Request(
    "${url}v1/audio/speech",
    json.dumps(body).encode(),
    {"Content-Type": "application/json"${key}},
)
with urllib.request.urlopen(request) as answer, open("speech.mp3", "wb") as file:
    file.write(answer.read())
`;
}

export function openai(body, { url, model, hasKey }) {
  const made = fileBody(body, model);
  // The client insists on these two.
  const asked = { voice: "alloy", input: "", ...made };
  const own = Object.fromEntries(Object.entries(asked).filter(([name]) => OPENAI.includes(name)));
  const extra = Object.fromEntries(Object.entries(asked).filter(([name]) => !OPENAI.includes(name)));
  const fields = Object.entries(own).map(([name, value]) => `    ${name}=${literal(value, "    ")},`);
  if (Object.keys(extra).length) fields.push("    extra_body=body,");
  const before = Object.keys(extra).length ? `body = ${literal(extra, "")}\n${recording(body)}` : "";
  const modules = `${body.ref_audio ? "import base64\n" : ""}${hasKey ? "import os\n" : ""}`;
  const key = hasKey ? `os.environ["SONORO_API_KEY"]` : `"none"`;
  return `${modules}${modules && "\n"}from openai import OpenAI

client = OpenAI(base_url="${url}v1", api_key=${key})
${before}with client.audio.speech.with_streaming_response.create(
${fields.join("\n")}
) as answer:
    answer.stream_to_file("speech.mp3")
`;
}

function recording(body) {
  if (!body.ref_audio) return "";
  const read = `base64.b64encode(open("${RECORDING}", "rb").read()).decode()`;
  return `body["ref_audio"] = "data:audio/wav;base64," + ${read}\n`;
}

/** `value` as Python writes it. */
function literal(value, indent) {
  const inner = `${indent}    `;
  if (Array.isArray(value)) {
    return `[\n${value.map((one) => `${inner}${literal(one, inner)},\n`).join("")}${indent}]`;
  }
  if (typeof value === "object") {
    const fields = Object.entries(value).map(([name, one]) => `${inner}${JSON.stringify(name)}: ${literal(one, inner)},\n`);
    return `{\n${fields.join("")}${indent}}`;
  }
  if (typeof value === "boolean") return value ? "True" : "False";
  return JSON.stringify(value);
}
