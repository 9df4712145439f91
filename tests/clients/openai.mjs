// `openai` for Node: whole, streamed, tools, errors, retries, abort.
import assert from "node:assert/strict";
import OpenAI from "openai";

const model = process.env.TASUKI_MODEL;
const client = new OpenAI({ baseURL: `${process.env.TASUKI_URL}/v1`, apiKey: "unused", maxRetries: 20 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const question = { model, messages, max_tokens: 16, temperature: 0 };
const weather = {
  type: "function",
  function: {
    name: "weather",
    parameters: {
      type: "object",
      properties: { city: { enum: ["Paris", "Rome"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

const models = await client.models.list();
assert.equal(models.data[0].id, model);

const whole = (await client.chat.completions.create(question)).choices[0].message.content;
assert.match(whole, /Paris/);
console.log("openai: whole:", whole);

let streamed = "";
let usage;
const stream_options = { include_usage: true };
for await (const chunk of await client.chat.completions.create({ ...question, stream: true, stream_options })) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, whole);
assert.ok(usage.completion_tokens > 0);
console.log("openai: streamed gives the same text");

const withTools = await client.chat.completions.create({ ...question, tools: [weather] });
assert.ok(withTools.choices[0].message.content || withTools.choices[0].message.tool_calls);
assert.ok(withTools.usage.prompt_tokens > usage.prompt_tokens);
const named = (name) => ({ tools: [weather], tool_choice: { type: "function", function: { name } } });
const calling = { ...question, ...named("weather"), max_tokens: 64 };
const called = (await client.chat.completions.create(calling)).choices[0];
assert.equal(called.finish_reason, "tool_calls");
assert.equal(called.message.tool_calls[0].function.name, "weather");
assert.match(JSON.parse(called.message.tool_calls[0].function.arguments).city, /^(Paris|Rome)$/);
let calledInParts = "";
for await (const chunk of await client.chat.completions.create({ ...calling, stream: true })) {
  calledInParts += chunk.choices[0]?.delta.tool_calls?.[0].function.arguments ?? "";
}
assert.equal(calledInParts, called.message.tool_calls[0].function.arguments);
console.log("openai: tools reach the model, and a call that must be made is made:", calledInParts);

await assert.rejects(client.chat.completions.create({ ...question, ...named("nobody") }), (error) => {
  return error instanceof OpenAI.BadRequestError && error.param === "tool_choice";
});
await assert.rejects(client.chat.completions.create({ ...question, model: "nobody" }), OpenAI.NotFoundError);
console.log("openai: errors have their types");

const schema = { type: "object", properties: { capital: { enum: ["Paris", "Rome"] } }, required: ["capital"] };
const json_schema = { name: "capital", strict: true, schema: { ...schema, additionalProperties: false } };
const response_format = { type: "json_schema", json_schema };
const bound = await client.chat.completions.create({ ...question, max_tokens: 64, response_format });
assert.match(JSON.parse(bound.choices[0].message.content).capital, /Paris|Rome/);
const unknown = { type: "json_schema", json_schema: { name: "no", schema: { not: {} } } };
await assert.rejects(client.chat.completions.create({ ...question, response_format: unknown }), (error) => {
  return error instanceof OpenAI.BadRequestError && error.param === "response_format";
});
console.log("openai: an answer keeps to a schema");

const asked = Array.from({ length: 4 }, () => client.chat.completions.create({ ...question, max_tokens: 64 }));
const answers = (await Promise.all(asked)).map((answer) => answer.choices[0].message.content);
assert.equal(new Set(answers).size, 1);
console.log("openai: who was turned away came again");

const long = await client.chat.completions.create({ ...question, max_tokens: 2000, stream: true });
for await (const chunk of long) {
  assert.ok(chunk.id);
  break;
}
console.log("openai: left a stream");
