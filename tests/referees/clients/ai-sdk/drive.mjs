// The AI SDK over chat completions and Anthropic's API: tools with zod schemas, whole and streamed.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { untilIdle } = await import(`${process.env.WEFT_COMMON}/checks.mjs`);
const { WEFT_URL: url, WEFT_MODEL: name } = process.env;
const known = process.env.WEFT_ANSWERS === "known";
const words = "one two three four five six seven eight nine ten";
const openai = createOpenAICompatible({
  name: "weft",
  baseURL: `${url}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });
const models = [openai(name), anthropic(name)];

const say = (text) => `script> say ${JSON.stringify(text)}`;
const call = (tool, input) => `script> call ${tool} ${JSON.stringify(input)}`;
const colourOf = tool({
  description: "Return the colour of a fruit.",
  inputSchema: z.object({
    fruit: z.enum(["apple", "plum"]),
    notes: z.record(z.string(), z.enum(["ripe", "green"])).optional(),
  }),
  execute: async ({ fruit }) => `The colour of ${fruit} is mauve.`,
});

function expect(word, text) {
  if (typeof text !== "string") throw new Error(`not a text: ${text}`);
  if (known && !text.includes(word)) throw new Error(`"${word}" is not in "${text}"`);
}

const base = (model) => ({ model, maxRetries: 0, maxOutputTokens: 60 });

async function first(model) {
  const { text, usage } = await generateText({ ...base(model), prompt: say("It is mauve.") });
  expect("It is mauve.", text);
  if (!(usage.inputTokens > 0)) throw new Error("no usage");
}

async function tools(model) {
  const { steps } = await generateText({
    ...base(model),
    maxOutputTokens: 200,
    tools: { colourOf },
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber || known ? "auto" : "required" }),
    prompt: call("colourOf", { fruit: "plum", notes: { skin: "ripe" } }),
  });
  const [{ toolResults, finishReason, content }] = steps;
  // A model without sense may fill a record until it is cut short.
  const cut = !known && finishReason === "length";
  if (toolResults.length < 1 && !cut) throw new Error(JSON.stringify(content));
  if (known) expect("mauve", steps[1].text);
  const four = { letters: 4 };
  const { object } = await generateObject({
    ...base(model),
    schema: z.object({ letters: z.number().int().min(0).max(99) }),
    // Anthropic's provider asks models that it does not know by a tool.
    prompt: model.provider.startsWith("anthropic") ? call("json", four) : say(JSON.stringify(four)),
  });
  if (known && object.letters !== 4) throw new Error(JSON.stringify(object));
}

async function stream(model) {
  const pieces = [];
  const { textStream } = streamText({ ...base(model), prompt: say(words), onError: fail });
  for await (const piece of textStream) pieces.push(piece);
  expect(words, pieces.join(""));
  if (known && pieces.length < 3) throw new Error(`not a stream: ${pieces}`);
}

function fail({ error }) {
  throw error;
}

async function second(model) {
  const messages = [{ role: "user", content: say("It is mauve.") }];
  const { response } = await generateText({ ...base(model), messages });
  messages.push(...response.messages, { role: "user", content: "script> recall" });
  expect("I said: It is mauve.", (await generateText({ ...base(model), messages })).text);
}

async function cancel(model) {
  const leaving = new AbortController();
  const { textStream } = streamText({
    ...base(model),
    maxOutputTokens: 4000,
    prompt: "script> wait",
    abortSignal: leaving.signal,
  });
  let count = 0;
  for await (const _ of textStream) if (++count === 3) leaving.abort();
  if (known && count < 3) throw new Error(`it ended after ${count} pieces`);
  await untilIdle(url);
}

for (const check of [first, tools, stream, second, cancel]) {
  let fault = null;
  try {
    for (const model of models) await check(model);
  } catch (error) {
    console.error(error);
    fault = `${error.name}: ${error.message} ${error.responseBody ?? ""}`.trim();
  }
  console.log(JSON.stringify({ check: check.name, fault }));
}
process.exit(0);
