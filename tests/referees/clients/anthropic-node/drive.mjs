// Anthropic's client for Node over message batches, by their plain and their beta form.

import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";

const { WEFT_URL: url, WEFT_MODEL: model, WEFT_COMMON: common } = process.env;
const { all, run, until } = await import(`${common}/checks.mjs`);
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const apis = [client.messages.batches, client.beta.messages.batches];
const made = [];

async function begin(api, count, tokens) {
  const params = { model, max_tokens: tokens, messages: [{ role: "user", content: "Hi" }] };
  const requests = Array.from({ length: count }, (_, place) => ({
    custom_id: `c${place}`,
    params,
  }));
  requests[count - 1] = { custom_id: "wrong", params: { ...params, max_tokens: -1 } };
  const batch = await api.create({ requests });
  assert.equal(batch.processing_status, "in_progress");
  assert.equal(batch.request_counts.processing, count);
  assert.equal(Date.parse(batch.expires_at) - Date.parse(batch.created_at), 86_400_000);
  return batch;
}

async function ended(api, id) {
  return until(async () => {
    const batch = await api.retrieve(id);
    return batch.processing_status === "ended" ? batch : null;
  });
}

async function create() {
  for (const api of apis) {
    const batch = await ended(api, (await begin(api, 6, 5)).id);
    const counts = { succeeded: 5, errored: 1, processing: 0, canceled: 0, expired: 0 };
    assert.deepEqual(batch.request_counts, counts);
    assert(Date.parse(batch.ended_at) >= Date.parse(batch.created_at));
    made.push(batch);
  }
}

async function list() {
  for (const api of apis) {
    const more = [];
    for (let number = 0; number < 3; number++) more.push((await begin(api, 1, 5)).id);
    for (const id of more) await ended(api, id);
    const found = (await all(api.list({ limit: 2 }))).map((batch) => batch.id);
    assert.deepEqual(found.slice(0, 3), more.toReversed());
    assert(found.length === new Set(found).size && found.length >= 5);
    const back = await all(api.list({ limit: 1, before_id: more[0] }));
    assert.deepEqual(back.map((batch) => batch.id), more.slice(1));
  }
}

async function results() {
  for (const [place, api] of apis.entries()) {
    const lines = await all(await api.results(made[place].id));
    const found = Object.fromEntries(lines.map((line) => [line.custom_id, line.result]));
    assert.equal(found.wrong.error.error.type, "invalid_request_error");
    delete found.wrong;
    assert.deepEqual(Object.keys(found).sort(), ["c0", "c1", "c2", "c3", "c4"]);
    for (const result of Object.values(found)) {
      assert.equal(result.type, "succeeded");
      assert(result.message.usage.output_tokens > 0);
    }
  }
}

async function cancel() {
  for (const api of apis) {
    const { id } = await begin(api, 500, 60);
    assert.equal((await api.cancel(id)).processing_status, "canceling");
    const batch = await ended(api, id);
    assert(batch.request_counts.canceled > 0);
    const lines = await all(await api.results(id));
    assert.equal(lines.length, 500);
    assert(lines.some((line) => line.result.type === "canceled"));
  }
}

async function _delete() {
  for (const [place, api] of apis.entries()) {
    const { id } = made[place];
    assert.equal((await api.delete(id)).type, "message_batch_deleted");
    await assert.rejects(api.retrieve(id), Anthropic.NotFoundError);
    await assert.rejects(api.results(id), Anthropic.NotFoundError);
    await assert.rejects(api.delete(id), Anthropic.NotFoundError);
  }
}
Object.defineProperty(_delete, "name", { value: "delete" });

await run(create, list, results, cancel, _delete);
