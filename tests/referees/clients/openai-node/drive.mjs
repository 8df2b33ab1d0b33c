// OpenAI's client for Node over files and batches.

import assert from "node:assert";
import OpenAI, { toFile } from "openai";

const { WEFT_URL: url, WEFT_MODEL: model, WEFT_COMMON: common } = process.env;
const { all, run, until } = await import(`${common}/checks.mjs`);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const path = "/v1/chat/completions";
const count = 6;
const over = ["completed", "failed", "expired", "cancelled"];
let made;

async function upload(number, tokens) {
  const messages = [{ role: "user", content: "Hi" }];
  const body = { model, max_tokens: tokens, messages };
  const lines = Array.from({ length: number }, (_, place) =>
    JSON.stringify({ custom_id: `c${place}`, method: "POST", url: path, body }),
  );
  return client.files.create({
    file: await toFile(Buffer.from(lines.join("\n")), "in.jsonl"),
    purpose: "batch",
    expires_after: { anchor: "created_at", seconds: 7200 },
  });
}

function begin(id) {
  return client.batches.create({
    input_file_id: id,
    endpoint: path,
    completion_window: "24h",
    metadata: { a: "b" },
  });
}

async function ended(id) {
  return until(async () => {
    const batch = await client.batches.retrieve(id);
    return over.includes(batch.status) ? batch : null;
  });
}

async function create() {
  const file = await upload(count, 5);
  assert.deepEqual(await client.files.retrieve(file.id), file);
  const text = await (await client.files.content(file.id)).text();
  assert.equal(text.split("\n").length, count);
  made = await ended((await begin(file.id)).id);
  assert.equal(made.status, "completed");
  assert.deepEqual(made.metadata, { a: "b" });
  assert.deepEqual(made.request_counts, { total: count, completed: count, failed: 0 });
}

async function list() {
  const files = [];
  for (let number = 0; number < 3; number++) files.push((await upload(1, 5)).id);
  const found = await all(client.files.list({ limit: 2 }), 3);
  assert.deepEqual(found.map((file) => file.id), files.toReversed());
  const batches = [];
  for (const id of files) batches.push((await begin(id)).id);
  const seen = await all(client.batches.list({ limit: 2 }));
  assert.deepEqual(seen.map((batch) => batch.id), [...batches.toReversed(), made.id]);
  for (const id of batches) assert.equal((await ended(id)).status, "completed");
}

async function results() {
  const text = await (await client.files.content(made.output_file_id)).text();
  const lines = text.trim().split("\n").map((line) => JSON.parse(line));
  const names = lines.map((line) => line.custom_id).sort();
  assert.deepEqual(names, Array.from({ length: count }, (_, place) => `c${place}`));
  for (const line of lines) assert.equal(line.response.body.object, "chat.completion");
}

async function cancel() {
  const batch = await begin((await upload(500, 60)).id);
  assert.equal((await client.batches.cancel(batch.id)).status, "cancelling");
  assert.equal((await ended(batch.id)).status, "cancelled");
}

async function gone(asking) {
  await assert.rejects(asking, OpenAI.NotFoundError);
}

async function _delete() {
  for (const file of await all(client.files.list())) {
    assert((await client.files.delete(file.id)).deleted);
  }
  assert.equal((await client.files.list()).data.length, 0);
  await gone(client.files.retrieve(made.output_file_id));
  await gone(client.files.content(made.output_file_id));
}
Object.defineProperty(_delete, "name", { value: "delete" });

await run(create, list, results, cancel, _delete);
