// What the `openai` package for Node reads of a model with trained weights.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [base, installed] = process.argv.slice(2);
const OpenAI = createRequire(pathToFileURL(`${installed}/`))("openai").OpenAI;

const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none" });
const content = "How many days are in a week?";
const same = { model: "m", temperature: 0 };
const chat = (more) =>
  client.chat.completions.create({ messages: [{ role: "user", content }], max_tokens: 48, ...same, ...more });
const results = {};

const { choices } = await chat({});
results["node chat"] = { text: choices[0].message.content, end: choices[0].finish_reason };

const streamed = { text: "", end: null, pieces: 0 };
for await (const chunk of await chat({ stream: true })) {
  const choice = chunk.choices[0];
  if (!choice) continue;
  streamed.text += choice.delta.content ?? "";
  streamed.end = choice.finish_reason;
  streamed.pieces += 1;
}
results["node chat, streamed"] = streamed;

const pieces = [];
let end = null;
const response = { input: content, max_output_tokens: 48, stream: true, ...same };
for await (const event of await client.responses.create(response)) {
  if (event.type === "response.output_text.delta") pieces.push(event.delta);
  if (event.type === "response.completed") end = event.response.status;
}
results["node responses, streamed"] = { text: pieces.join(""), end, pieces: pieces.length };

process.stdout.write(JSON.stringify(results));
