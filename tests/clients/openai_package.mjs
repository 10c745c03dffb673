// The `openai` package for Node; the same idea as in common.py.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [base, installed] = process.argv.slice(2);
// The packages are not beside this file: they are installed outside of the clone.
const find = createRequire(pathToFileURL(`${installed}/`));
const OpenAI = find("openai").OpenAI;

const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none" });
const same = { model: "m", temperature: 0, seed: 7 };
const messages = [{ role: "user", content: "what is it?" }];
const parameters = { type: "object", properties: { a: { type: "integer" } }, required: ["a"] };
const tools = [{ type: "function", function: { name: "add", description: "adds", parameters } }];
const results = {};

async function run(name, call) {
  try {
    results[name] = await call();
  } catch (error) {
    results[name] = { raised: error.constructor.name, status: error.status, body: error.error ?? error.message };
  }
}

async function all(stream) {
  const events = [];
  for await (const event of await stream) events.push(event);
  return events;
}

const chat = (more) => client.chat.completions.create({ messages, max_tokens: 24, ...same, ...more });

await run("models", async () => (await client.models.list()).data.map(({ id, object }) => ({ id, object })));
await run("chat", () => chat({}));
await run("chat, streamed", () => all(chat({ stream: true, stream_options: { include_usage: true } })));
await run("tools", () => chat({ max_tokens: 160, tools, tool_choice: "required" }));
await run("tools, streamed", () => all(chat({ max_tokens: 160, tools, tool_choice: "required", stream: true })));
await run("embeddings", () => client.embeddings.create({ model: "m", input: ["one text", "and another"] }));
await run("completions", () => client.completions.create({ prompt: "once upon", max_tokens: 16, ...same }));
const respond = (more) =>
  client.responses.create({ input: "what is it?", max_output_tokens: 24, ...same, ...more });
await run("responses", () => respond({}));
await run("responses, streamed", () => all(respond({ stream: true })));
await run("left in the middle", async () => {
  const seen = [];
  for await (const event of await chat({ stream: true, max_tokens: 400 })) {
    seen.push(event);
    if (seen.length === 3) break;
  }
  return seen;
});
await run("and the next one", () => chat({ max_tokens: 4 }));
await run("error: no messages", () => client.post("/chat/completions", { body: { model: "m" } }));

process.stdout.write(JSON.stringify(results));
