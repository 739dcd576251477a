// Vercel's AI SDK and OpenAI's own client for node. Arguments: base URL, token.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [root, baseURL, apiKey] = process.argv.slice(2);
const require = createRequire(`${root}/`);
const { generateText, streamText, tool, embed, Output, APICallError } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { OpenAI } = require("openai");
const { z } = require("zod");

const tools = { look: tool({ description: "look", inputSchema: z.object({}), execute: async () => "x" }) };
const openai = createOpenAI({ baseURL, apiKey });
const compatible = createOpenAICompatible({ name: "ml_rag", baseURL, apiKey, supportsStructuredOutputs: true });
for (const [name, addresses] of [["pages", 1], ["files", 0]]) {
  for (const [model, shows] of [[openai.chat(name), true], [openai.responses(name), true], [compatible(name), false]]) {
    const whole = await generateText({ model, prompt: "boat", tools, maxRetries: 0 });
    assert.match(whole.text, /^fake answer to: boat/);
    if (shows) assert.equal(whole.sources.length, addresses);
    assert.ok(whole.usage.totalTokens > 0);
    const none = await generateText({ model, prompt: "boat", tools, toolChoice: "none", maxRetries: 0 });
    assert.equal(none.text, whole.text);
    const demanded = generateText({ model, prompt: "boat", tools, toolChoice: "required", maxRetries: 0 });
    await assert.rejects(demanded, (error) => APICallError.isInstance(error) && error.statusCode === 400);
    const output = Output.object({ schema: z.object({ color: z.string() }) });
    assert.deepEqual((await generateText({ model, prompt: "boat", output, maxRetries: 0 })).output, { color: "" });
    const stream = streamText({ model, prompt: "boat", maxRetries: 0, onError: ({ error }) => { throw error; } });
    assert.match(await stream.text, /^fake answer to: boat/);
    if (shows) assert.equal((await stream.sources).length, addresses);
  }
  const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
  const messages = [{ role: "user", content: "boat" }];
  const answer = await client.chat.completions.create({ model: name, messages });
  assert.equal(answer.choices[0].message.annotations.length, addresses);
}
const { embedding } = await embed({ model: openai.embedding("fake-embed"), value: "boat", maxRetries: 0 });
assert.equal(embedding.length, 16);
console.log("well");
