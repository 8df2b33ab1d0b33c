// Ollama's client for Node: chats, tools, a schema, streams, and the model's records.

import assert from "node:assert";
import { Ollama } from "ollama";

const { run, untilIdle } = await import(`${process.env.WEFT_COMMON}/checks.mjs`);
const { WEFT_URL: url, WEFT_MODEL: model } = process.env;
const known = process.env.WEFT_ANSWERS === "known";
const words = "one two three four five six seven eight nine ten";
const client = new Ollama({ host: url });
const options = { num_predict: 60, num_ctx: 4096 };

const say = (text) => `script> say ${JSON.stringify(text)}`;
const asked = (content) => ({ role: "user", content });
const chat = (messages, more = {}) => client.chat({ model, messages, options, ...more });
const colourOf = {
  type: "function",
  function: {
    name: "colour_of",
    description: "Return the colour of a fruit.",
    parameters: {
      type: "object",
      properties: { fruit: { type: "string", enum: ["apple", "plum"] } },
      required: ["fruit"],
    },
  },
};

function expect(word, text) {
  assert.equal(typeof text, "string");
  if (known) assert(text.includes(word), `"${word}" is not in "${text}"`);
}

async function first() {
  const answer = await chat([asked(say("It is mauve."))]);
  expect("It is mauve.", answer.message.content);
  assert(answer.done && answer.prompt_eval_count > 0);
  const prompted = await client.generate({ model, prompt: say("It is mauve."), options });
  expect("It is mauve.", prompted.response);
  const { models } = await client.list();
  assert(models.some(({ name }) => name.startsWith(model)));
  assert((await client.show({ model })).capabilities.includes("completion"));
}

async function tools() {
  const question = asked(`script> call colour_of {"fruit": "plum"}`);
  const { message } = await chat([question], { tools: [colourOf] });
  if (known) {
    const [call] = message.tool_calls;
    assert.equal(call.function.arguments.fruit, "plum");
    const told = { role: "tool", tool_name: "colour_of", content: "It is mauve." };
    const again = await chat([question, message, told], { tools: [colourOf] });
    expect("mauve", again.message.content);
  }
  const format = colourOf.function.parameters;
  const shaped = await chat([asked(say('{"fruit": "plum"}'))], { format });
  expect("plum", shaped.message.content);
}

async function stream() {
  const pieces = [];
  for await (const part of await chat([asked(say(words))], { stream: true })) {
    if (part.message.content) pieces.push(part.message.content);
  }
  expect(words, pieces.join(""));
  assert(!known || pieces.length > 2, `not a stream: ${pieces}`);
}

async function second() {
  const question = asked(say("It is mauve."));
  const { message } = await chat([question]);
  const answer = await chat([question, message, asked("script> recall")]);
  expect("I said: It is mauve.", answer.message.content);
}

async function cancel() {
  const parts = await chat([asked("script> wait")], { stream: true, options: { num_predict: 4000 } });
  let count = 0;
  try {
    for await (const _ of parts) if (++count === 3) parts.abort();
  } catch (error) {
    assert.equal(error.name, "AbortError");
  }
  assert(!known || count >= 3, `it ended after ${count} pieces`);
  await untilIdle(url);
}

await run(first, tools, stream, second, cancel);
