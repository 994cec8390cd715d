// OpenAI's client for Node: completions, chats, streams, errors.
const assert = require("node:assert");
const { OpenAI, NotFoundError, BadRequestError } = require("openai");

const [url, text, chatText] = process.argv.slice(2);
const common = { model: "tiny_llama", max_tokens: 24, temperature: 0 };
const messages = [{ role: "user", content: "def main():" }];

async function main() {
  const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const whole = await client.completions.create({ prompt: "def main():", ...common });
  assert.equal(whole.choices[0].text, text);
  assert.equal(whole.usage.completion_tokens, 24);

  let streamed = "";
  for await (const chunk of await client.completions.create({ prompt: "def main():", stream: true, ...common }))
    streamed += chunk.choices[0].text;
  assert.equal(streamed, text);

  const chat = await client.chat.completions.create({ messages, logprobs: true, top_logprobs: 3, ...common });
  assert.equal(chat.choices[0].message.content, chatText);
  assert.equal(chat.choices[0].logprobs.content.length, 24);

  const runner = client.chat.completions.stream({ messages, ...common });
  assert.equal(await runner.finalContent(), chatText);

  await assert.rejects(client.completions.create({ ...common, prompt: "x", model: "another" }), NotFoundError);
  await assert.rejects(
    client.completions.create({ ...common, prompt: "x ".repeat(5000) }),
    (error) => error instanceof BadRequestError && error.code === "context_length_exceeded",
  );

  const left = await client.completions.create({ model: "tiny_llama", prompt: "x", max_tokens: 900, stream: true });
  for await (const _ of left) break;
  assert.equal((await client.completions.create({ prompt: "def main():", ...common })).choices[0].text, text);
}

main();
