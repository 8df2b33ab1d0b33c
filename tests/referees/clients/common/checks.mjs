// Shared by Node's programs of clients: reports of checks, and waiting.

import assert from "node:assert";

const BATCH_MS = 300_000;
const IDLE_MS = 30_000;

export async function run(...checks) {
  for (const check of checks) {
    let fault = null;
    try {
      await check();
    } catch (error) {
      console.error(error);
      fault = `${error.name}: ${error.message}`;
    }
    console.log(JSON.stringify({ check: check.name, fault }));
  }
  process.exit(0);
}

export async function until(ask) {
  const end = Date.now() + BATCH_MS;
  for (;;) {
    const found = await ask();
    if (found !== null) return found;
    assert(Date.now() < end, "the batch did not end");
    await new Promise((resume) => setTimeout(resume, 100));
  }
}

export async function all(iterable, most = Infinity) {
  const found = [];
  for await (const item of iterable) if (found.push(item) >= most) break;
  return found;
}

// Wait until no request is under way at the server.
export async function untilIdle(url) {
  const end = Date.now() + IDLE_MS;
  for (;;) {
    const page = await (await fetch(`${url}/metrics`)).text();
    const busy = page.match(/^weft:num_requests_(running|waiting)\S* [^0\s].*$/gm);
    if (busy === null) return;
    assert(Date.now() < end, `requests go on: ${busy}`);
    await new Promise((resume) => setTimeout(resume, 100));
  }
}
