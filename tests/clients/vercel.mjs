// `ai` (Vercel) with an OpenAI-compatible provider: whole, streamed, tools, errors, retries, abort.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";

const provider = createOpenAICompatible({ name: "tasuki", baseURL: `${process.env.TASUKI_URL}/v1` });
const model = provider(process.env.TASUKI_MODEL);
const question = { model, prompt: "What is the capital of France?", maxOutputTokens: 16, temperature: 0 };

const whole = await generateText(question);
assert.match(whole.text, /Paris/);
assert.ok(whole.usage.outputTokens > 0);
console.log("ai: whole:", whole.text);

let streamed = "";
for await (const part of streamText(question).textStream) streamed += part;
assert.equal(streamed, whole.text);
console.log("ai: streamed gives the same text");

const inputSchema = jsonSchema({
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
});
const weather = tool({ description: "The weather in a city", inputSchema });
const withTools = await generateText({ ...question, tools: { weather } });
assert.ok(withTools.text || withTools.toolCalls.length);
const required = { ...question, maxOutputTokens: 64, tools: { weather }, toolChoice: "required" };
const called = (await generateText(required)).toolCalls;
assert.ok(called.length > 0 && called.every((call) => call.toolName === "weather"));
assert.match(called[0].input.city, /^(Paris|Rome)$/);
const calledInParts = await streamText(required).toolCalls;
assert.deepEqual(calledInParts[0].input, called[0].input);
console.log("ai: tools are taken, and a call that must be made is made:", called[0].input);

const unnamed = tool({ description: "Its name is none", inputSchema });
const odd = { ...question, tools: { "a b": unnamed } };
await assert.rejects(generateText(odd), (error) => error.statusCode === 400 && /tools\[0\]/.test(error.message));
const nobody = { ...question, model: provider("nobody") };
await assert.rejects(generateText(nobody), (error) => error.statusCode === 404);
console.log("ai: errors have their status");

const several = { ...question, maxOutputTokens: 64, maxRetries: 20 };
const answers = await Promise.all(Array.from({ length: 4 }, () => generateText(several)));
assert.equal(new Set(answers.map((answer) => answer.text)).size, 1);
console.log("ai: who was turned away came again");

const controller = new AbortController();
const long = streamText({ ...question, maxOutputTokens: 2000, abortSignal: controller.signal });
for await (const part of long.textStream) {
  assert.ok(part);
  controller.abort();
  break;
}
console.log("ai: left a stream");
