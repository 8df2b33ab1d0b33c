// One answer of the model: the request for it, and what its stream adds to a message.
import { ApiError, events, postJson } from "./api.js";

/** A message as the API wants it; null for answers that have nothing in them. */
function forApi(message) {
  if (message.role === "tool") {
    return { role: "tool", tool_call_id: message.call, content: message.content };
  }
  if (message.role === "user") {
    const images = (message.images ?? []).map((url) => ({ type: "image_url", image_url: { url } }));
    const content = images.length ? [{ type: "text", text: message.content }, ...images] : message.content;
    return { role: "user", content };
  }
  const calls = message.calls.map(({ id, name, input }) => ({
    id, type: "function", function: { name, arguments: input },
  }));
  if (!message.content && !calls.length) return null;
  return { role: "assistant", content: message.content || null, ...(calls.length && { tool_calls: calls }) };
}

/** The body of the request for the next answer of a chat. */
export function bodyOf(chat) {
  const { system, temperature, most, tools } = chat.options;
  const messages = chat.messages.map(forApi).filter(Boolean);
  if (system) messages.unshift({ role: "system", content: system });
  return {
    model: chat.model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    service_tier: chat.class,
    ...(temperature !== null && { temperature }),
    ...(most !== null && { max_completion_tokens: most }),
    ...(tools && { tools: JSON.parse(tools) }),
  };
}

export const newAnswer = () => ({
  role: "assistant", content: "", reasoning: "", calls: [], open: true, figures: {}, note: "",
});

/**
 * Ask for an answer and let it grow in `answer`; `changed` is called after each change.
 * Ends with a note in the answer if something goes wrong: what has come by then stays.
 */
export async function takeTurn(body, answer, signal, changed) {
  const started = performance.now();
  let first = null;
  let last = null;
  try {
    const response = await postJson("v1/chat/completions", body, { signal });
    answer.figures.class = response.headers.get("x-weft-class");
    for await (const event of events(response)) {
      if (event.error) throw new ApiError(event.error.message, 200, event.error.code);
      const choice = event.choices?.[0];
      if (choice && addDelta(answer, choice.delta)) {
        last = performance.now();
        first ??= last;
        answer.figures.ttft_ms = first - started;
      }
      if (choice?.finish_reason) answer.figures.end = choice.finish_reason;
      if (event.usage) answer.figures.tokens = event.usage.completion_tokens;
      changed();
    }
    if (!answer.figures.end) throw new ApiError("The answer broke off before its end.", 0, "broken");
  } catch (error) {
    answer.failed = error.name !== "AbortError";
    answer.note = answer.failed ? error.message : "Stopped.";
  }
  const { tokens } = answer.figures;
  if (tokens > 1 && last > first) answer.figures.tpot_ms = (last - first) / (tokens - 1);
  answer.open = false;
  changed();
}

/** Add a delta to an answer; whether it had anything of the model's output. */
function addDelta(answer, delta) {
  answer.content += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (answer.calls[part.index] ??= { id: part.id, name: "", input: "" });
    call.name += part.function?.name ?? "";
    call.input += part.function?.arguments ?? "";
  }
  return Boolean(delta.content || delta.reasoning_content || delta.tool_calls);
}
