// Drives Chromium through the page, check by check; see run.py.

import assert from "node:assert";
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { chromium } from "playwright-core";

const { WEFT_SCRIPT, WEFT_KEYED, WEFT_WHOLE, CHROMIUM, PICTURES } = process.env;
const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const OURS = [WEFT_SCRIPT, WEFT_KEYED, WEFT_WHOLE];
const DESK = { width: 1180, height: 800 };
const PHONE = { width: 360, height: 740 };
const PATIENCE_MS = 20_000;

const tell = (said) => process.stdout.write(`${JSON.stringify(said)}\n`);
const say = (text) => `script> say ${JSON.stringify(text)}`;

/** A fresh browser profile; what it asks of other hosts, and what its console says of errors, is kept. */
async function opened(browser, url, options = {}) {
  const context = await browser.newContext({ viewport: DESK, acceptDownloads: true, ...options });
  await context.grantPermissions(["clipboard-read", "clipboard-write"], { origin: url });
  const page = await context.newPage();
  page.setDefaultTimeout(PATIENCE_MS);
  page.outside = [];
  page.complaints = [];
  context.on("request", (request) => {
    const asked = request.url();
    if (!/^(?:data|blob):/.test(asked) && !OURS.some((server) => asked.startsWith(`${server}/`))) page.outside.push(asked);
  });
  page.on("pageerror", (error) => page.complaints.push(String(error)));
  page.on("console", (message) => {
    if (message.type() === "error" && !/status of (401|403|503)/.test(message.text())) page.complaints.push(message.text());
  });
  page.on("dialog", (dialog) => {
    page.complaints.push(`a dialog: ${dialog.message()}`);
    dialog.dismiss();
  });
  await page.goto(`${url}/`);
  return page;
}

async function ask(page, text) {
  await page.getByLabel("Message", { exact: true }).fill(text);
  await page.keyboard.press("Enter");
}

const answers = (page) => page.getByRole("article", { name: "Answer" });
const ended = async (page, number = 1) => {
  await page.getByRole("button", { name: "Answer again" }).nth(number - 1).waitFor();
  await page.getByRole("button", { name: "Send" }).waitFor();
};

/** Fails with what axe finds wrong with what the page shows. */
async function accessible(page, what) {
  await page.evaluate(AXE);
  const found = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
  const wrong = found.violations.map((row) => `${row.id}: ${row.nodes.map((node) => node.target.join(" ")).join(", ")}`);
  assert.equal(wrong.length, 0, `${what}: ${wrong.join("; ")}`);
}

async function fits(page) {
  const [inner, whole] = await page.evaluate(() => [innerWidth, document.scrollingElement.scrollWidth]);
  assert(whole <= inner, `the page is ${whole} px wide in a window of ${inner}`);
}

const picture = async (page, name) => {
  if (PICTURES) await page.screenshot({ path: `${PICTURES}/${name}.png` });
};

// -- checks: each gets a browser, and ends with the pages that it has opened ----------------------

async function stream(browser) {
  const page = await opened(browser, WEFT_SCRIPT);
  const text = `A list:\n\n- one\n- **two**\n\n\`\`\`python\nprint("x")  # note\n\`\`\`\n\n| a | b |\n|---|---|\n| 1 | 2 |`;
  await ask(page, say(text));
  await ended(page);
  const prose = answers(page).locator(".prose");
  assert.equal(await prose.locator("li strong").textContent(), "two");
  await prose.locator("code .hljs-string").waitFor();
  assert.equal(await prose.locator("td").count(), 2);
  const figures = await page.locator(".figures").textContent();
  assert.match(figures, /TTFT\s*[\d.]+ m?s/);
  assert.match(figures, /TPOT\s*[\d.]+ m?s/);
  assert.match(figures, /\d+ tokens\s*interactive/);
  await prose.getByRole("button", { name: "Copy" }).click();
  assert.match(await page.evaluate(() => navigator.clipboard.readText()), /^print\("x"\)/);
  return [page];
}

async function growing(browser) {
  const page = await opened(browser, WEFT_SCRIPT);
  await ask(page, say("word ".repeat(600)));
  const prose = answers(page).locator(".prose");
  await prose.filter({ hasText: "word" }).waitFor();
  const early = (await prose.textContent()).length;
  assert.equal(await page.getByRole("log").getAttribute("aria-busy"), "true");
  await ended(page);
  assert((await prose.textContent()).length > early, "the text came in one piece");
  assert.equal(await page.getByRole("log").getAttribute("aria-busy"), "false");
  return [page];
}

async function stop(browser) {
  const page = await opened(browser, WEFT_SCRIPT);
  await ask(page, "script> wait");
  await answers(page).filter({ hasText: "waiting" }).waitFor();
  await page.getByRole("button", { name: "Stop" }).click();
  await ended(page);
  await page.getByText("Stopped.").waitFor();
  await page.getByRole("button", { name: "Answer again" }).click();
  await page.getByRole("button", { name: "Stop" }).waitFor();
  await page.getByLabel("Message", { exact: true }).press("Escape");
  await page.getByText("Stopped.").waitFor();
  return [page];
}

async function key(browser) {
  const page = await opened(browser, WEFT_KEYED);
  const dialog = page.getByRole("dialog", { name: "API key" });
  await dialog.waitFor();
  await accessible(page, "the dialog for a key");
  await dialog.getByLabel("API key").fill("wrong");
  await page.keyboard.press("Enter");
  await dialog.getByText("refused").waitFor();
  await dialog.getByLabel("API key").fill("the-right-key");
  await page.keyboard.press("Enter");
  await dialog.waitFor({ state: "detached" });
  await ask(page, say("Known."));
  await answers(page).filter({ hasText: "Known." }).waitFor();
  assert.deepEqual(await page.getByLabel("Service class").locator("option").allTextContents(), ["interactive", "flex"]);
  const kept = await page.evaluate(() => JSON.stringify([{ ...localStorage }, Object.values(sessionStorage)]));
  assert.match(kept, /the-right-key/);
  assert.doesNotMatch(await page.evaluate(() => JSON.stringify({ ...localStorage })), /the-right-key/);
  await page.reload();
  await page.getByText("Known.", { exact: true }).first().waitFor();
  assert.equal(await dialog.count(), 0);
  await page.getByRole("link", { name: "Loom", exact: true }).click();
  await page.getByRole("alert").filter({ hasText: "is for the keys that" }).waitFor();
  await page.locator(".drop").waitFor(); // who may not see the loom may have batches
  return [page];
}

async function classes(browser) {
  const page = await opened(browser, WEFT_SCRIPT);
  await page.getByLabel("Service class").selectOption("batch");
  await ask(page, say("In the batch."));
  await ended(page);
  assert.match(await page.locator(".figures").textContent(), /batch/);
  return [page];
}

async function hostile(browser) {
  const page = await opened(browser, WEFT_SCRIPT);
  const text = [
    "<script>globalThis.hacked = 1</script><img src=x onerror='globalThis.hacked = 2'>",
    "<svg onload='globalThis.hacked = 3'></svg><iframe src='https://evil.example'></iframe>",
    "<style>body { display: none }</style><form action='https://evil.example'><input name=q></form>",
    "[a](javascript:globalThis.hacked=4) [b](data:text/html,x) [c](https://fine.example/c) [d](//evil.example/d)",
    "![spy](https://evil.example/spy.png) <div style='position:fixed' class='composer' onclick='hacked=5'>x</div>",
    "<a href='vbscript:x'>e</a>\n\n```html\n<img src=x onerror=globalThis.hacked=7>\n```\n\nThe end.",
    "<math><mtext><table><mglyph><style><img src=x onerror=globalThis.hacked=6>",
  ].join("\n\n");
  await ask(page, say(text));
  await ended(page);
  const found = await page.locator(".prose").evaluate((box) => ({
    tags: [...box.querySelectorAll("script,img,svg,iframe,style,form,input,object,embed,math,link,meta")].map((x) => x.tagName),
    handlers: [...box.querySelectorAll("*")].flatMap((x) => x.getAttributeNames().filter((name) => /^on|^style$/.test(name))),
    links: [...box.querySelectorAll("a[href]")].map((x) => x.getAttribute("href")),
    rels: [...box.querySelectorAll("a[href]")].every((x) => x.rel.includes("noopener") && x.target === "_blank"),
    styled: box.querySelectorAll(".composer").length,
  }));
  assert.deepEqual(found.tags, []);
  assert.deepEqual(found.handlers, []);
  assert.equal(found.styled, 0);
  assert(found.rels);
  assert.deepEqual(found.links.sort(), ["https://evil.example/spy.png", "https://fine.example/c"]);
  await page.getByText("The end.", { exact: true }).waitFor();
  assert.equal(await page.evaluate(() => globalThis.hacked), undefined);
  const deep = await page.evaluate(async () => {
    const { render } = await import("./page/js/markdown.js");
    return [...render(`${">".repeat(4000)} deep`, true).children].map((element) => [element.tagName, element.textContent.length]);
  });
  assert.deepEqual(deep, [["P", 4005]]);
  // what the sanitiser parses is not shown; the policy reports styles there nevertheless
  page.complaints = page.complaints.filter((line) => !line.startsWith("Applying inline style violates"));
  return [page];
}

async function reasoning(browser) {
  const page = await opened(browser, WEFT_SCRIPT);
  await ask(page, say("<think>It is easy.</think>Forty-two."));
  await ended(page);
  assert.equal((await answers(page).locator(".prose").textContent()).trim(), "Forty-two.");
  assert(!(await page.getByText("It is easy.", { exact: true }).isVisible()));
  await page.locator("summary").click();
  assert(await page.getByText("It is easy.", { exact: true }).isVisible());
  return [page];
}

async function tools(browser) {
  const page = await opened(browser, WEFT_SCRIPT);
  await page.getByRole("button", { name: "Options" }).click();
  const tool = { type: "function", function: { name: "weather", parameters: { type: "object", properties: { city: { type: "string" } } } } };
  await page.getByLabel("Tools, as a JSON list").fill(JSON.stringify([tool]));
  await ask(page, 'script> call weather {"city": "Ulm"}');
  const call = page.getByRole("region", { name: "Tool call: weather" });
  await call.getByText('"city": "Ulm"').waitFor();
  await call.getByLabel("Output of the tool").fill("12 degrees");
  await call.getByRole("button", { name: "Give to the model" }).click();
  await answers(page).filter({ hasText: "Result: 12 degrees" }).waitFor();
  await ask(page, 'script> call weather {"city": "Bonn"}');
  await page.getByLabel("Output of the tool").waitFor();
  await ask(page, say("Never mind.")); // instead of an output
  await answers(page).filter({ hasText: "Never mind." }).waitFor();
  assert.equal(await page.getByLabel("Output of the tool").count(), 0);
  return [page];
}

async function edit(browser) {
  const page = await opened(browser, WEFT_SCRIPT);
  await ask(page, say("First."));
  await ended(page);
  await ask(page, say("Second."));
  await ended(page, 2);
  await page.getByRole("button", { name: "Edit" }).first().click();
  await page.getByLabel("Your message").fill(say("Other."));
  await page.keyboard.press("Enter");
  await answers(page).filter({ hasText: "Other." }).waitFor();
  await ended(page);
  assert.equal(await answers(page).count(), 1);
  await page.getByRole("button", { name: "Answer again" }).click();
  await ended(page);
  assert.equal(await answers(page).count(), 1);
  assert.equal((await answers(page).locator(".prose").textContent()).trim(), "Other.");
  return [page];
}

async function chats(browser) {
  const page = await opened(browser, WEFT_SCRIPT);
  await ask(page, say("Of the first chat."));
  await ended(page);
  await page.getByRole("button", { name: "New chat" }).click();
  await ask(page, say("Of the second chat."));
  await ended(page);
  await page.reload();
  await answers(page).getByText("Of the second chat.").waitFor();
  const list = page.getByLabel("Chats").getByRole("listitem");
  assert.equal(await list.count(), 2);
  await list.nth(1).getByRole("button").click();
  await answers(page).getByText("Of the first chat.").waitFor();
  const saved = async (name) => {
    const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name }).click()]);
    return readFileSync(await download.path(), "utf8");
  };
  assert.match(await saved("Save as Markdown"), /## You\n\n[^]*Of the first chat\./);
  assert.equal(JSON.parse(await saved("Save as JSON")).messages.length, 2);
  await page.getByRole("button", { name: "Delete this chat" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Delete" }).click();
  await page.getByRole("heading", { name: "New chat" }).waitFor();
  await page.reload();
  await list.first().waitFor();
  assert.equal(await list.count(), 1);
  const tabs = { one: page, another: await page.context().newPage() };
  await tabs.another.goto(`${WEFT_SCRIPT}/`);
  for (const tab of Object.values(tabs)) await tab.getByLabel("Chats").getByRole("listitem").getByRole("button").click();
  for (const [name, tab] of Object.entries(tabs)) {
    await ask(tab, say(`Of ${name} tab.`));
    await ended(tab, 2);
  }
  for (const [name, tab] of Object.entries(tabs)) { // neither has overwritten what the other one has
    await tab.reload();
    await answers(tab).getByText(`Of ${name} tab.`).waitFor();
    assert.equal(await tab.getByLabel("Chats").getByRole("listitem").count(), 2);
  }
  return [page];
}

async function left(browser) {
  const page = await opened(browser, WEFT_SCRIPT);
  await ask(page, "script> wait");
  await answers(page).filter({ hasText: "waiting" }).waitFor();
  await page.waitForTimeout(1500); // an answer that grows is saved every second
  await page.reload();
  await page.getByText("The page was left before the end of this answer.").waitFor();
  await answers(page).filter({ hasText: "waiting" }).waitFor();
  return [page];
}

async function images(browser) {
  const page = await opened(browser, WEFT_SCRIPT);
  await page.getByLabel("Service class").waitFor();
  assert.equal(await page.getByLabel("Attach images").count(), 0);
  await page.route("**/v1/models", async (route) => {
    const answer = await route.fetch();
    const body = await answer.json();
    for (const model of body.data) model.input_modalities = ["text", "image"];
    await route.fulfill({ response: answer, json: body });
  });
  let sent = null;
  await page.route("**/v1/chat/completions", (route) => {
    sent = route.request().postDataJSON();
    return route.fulfill({ status: 400, json: { error: { message: "No images today.", code: "x" } } });
  });
  await page.reload();
  const dot = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==";
  await page.getByLabel("Attach images").setInputFiles({ name: "dot.png", mimeType: "image/png", buffer: Buffer.from(dot, "base64") });
  await page.getByAltText("Image 1").waitFor();
  await ask(page, "What is this?");
  await page.getByText("No images today.").waitFor();
  assert.match(sent.messages[0].content[1].image_url.url, /^data:image\/png;base64,/);
  page.complaints = page.complaints.filter((line) => !line.includes("status of 400"));
  return [page];
}

async function broken(browser) {
  const page = await opened(browser, WEFT_SCRIPT);
  await page.route("**/v1/chat/completions", (route) => route.abort());
  await ask(page, say("Here again."));
  await page.getByText("The server does not answer. Is it still running?").waitFor();
  await page.unroute("**/v1/chat/completions");
  await page.getByRole("button", { name: "Answer again" }).click();
  await answers(page).filter({ hasText: "Here again." }).waitFor();
  await ended(page);
  page.complaints = page.complaints.filter((line) => !line.includes("ERR_FAILED"));
  return [page];
}

async function killed(browser) {
  const page = await opened(browser, WEFT_WHOLE);
  await page.getByRole("button", { name: "Options" }).click();
  await page.getByLabel("Most tokens of an answer").fill("400");
  await ask(page, "Write a long list of Python functions.");
  await answers(page).locator(".prose").waitFor();
  const early = (await answers(page).locator(".prose").textContent()).length;
  tell({ order: "kill engine" });
  await page.getByRole("button", { name: "Answer again" }).waitFor({ timeout: 60_000 });
  assert.equal(await page.locator(".wrong").count(), 0, await page.locator(".wrong").allTextContents());
  assert((await answers(page).locator(".prose").textContent()).length > early, "nothing came after the kill");
  await page.getByRole("link", { name: "Loom", exact: true }).click();
  await page.getByRole("heading", { name: "Recoveries" }).waitFor();
  await page.getByText("engine 2 took over").waitFor();
  return [page];
}

const line = (number, body = {}) => JSON.stringify({
  custom_id: `line-${number}`, method: "POST", url: "/v1/chat/completions",
  body: { model: "builtin", max_tokens: 24, messages: [{ role: "user", content: `Count to ${number}.` }], ...body },
});

/** Drop a file as people do, with the events that browsers send. */
async function drop(page, name, text) {
  const carried = await page.evaluateHandle(([name, text]) => {
    const carried = new DataTransfer();
    carried.items.add(new File([text], name));
    return carried;
  }, [name, text]);
  await page.locator(".drop").dispatchEvent("dragover", { dataTransfer: carried });
  await page.locator(".drop").dispatchEvent("drop", { dataTransfer: carried });
}

async function batch(browser) {
  const page = await opened(browser, WEFT_WHOLE);
  await page.goto(`${WEFT_WHOLE}/#loom`);
  await page.locator(".drop").waitFor();
  await drop(page, "nightly.jsonl", Array.from({ length: 40 }, (_, number) => line(number)).join("\n"));
  const row = page.getByRole("listitem").filter({ hasText: "nightly.jsonl" });
  await row.getByText("completed").waitFor({ timeout: 90_000 });
  assert.equal(await row.getByRole("progressbar").getAttribute("value"), "1");
  await row.getByText("40 of 40 lines").waitFor();
  const [download] = await Promise.all([page.waitForEvent("download"), row.getByRole("button", { name: "Results" }).click()]);
  assert.equal(readFileSync(await download.path(), "utf8").trim().split("\n").length, 40);
  return [page];
}

async function faults(browser) {
  const page = await opened(browser, WEFT_WHOLE);
  await page.goto(`${WEFT_WHOLE}/#loom`);
  await page.locator(".drop").waitFor();
  await drop(page, "words.jsonl", "no JSON at all");
  await page.getByText("its first line is no JSON").waitFor();
  await drop(page, "bad.jsonl", [line(1), "{ no JSON }", line(1)].join("\n"));
  const row = page.getByRole("listitem").filter({ hasText: "bad.jsonl" });
  await row.getByText("Line 2:").waitFor();
  assert.match(await row.locator(".faults").textContent(), /JSON[^]*Line 3:.*custom_id/);
  await drop(page, "late.jsonl", Array.from({ length: 3000 }, (_, number) => line(number)).join("\n"));
  const late = page.getByRole("listitem").filter({ hasText: "late.jsonl" }).first();
  await late.getByRole("button", { name: "Cancel" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Cancel the batch" }).click();
  await late.getByText("cancelled").waitFor();
  return [page];
}

/** Work of several classes at once, so that there is something to see. */
async function traffic(page) {
  await page.evaluate(async () => {
    const send = (number, tier) => fetch("v1/completions", {
      method: "POST", headers: { "content-type": "application/json" },
      body: JSON.stringify({ model: "builtin", prompt: `def part_${number}(): `.repeat(4 + 2 * (number % 5)),
        max_tokens: 24 + 9 * (number % 7), ignore_eos: true, service_tier: tier, seed: number }),
    }).then((answer) => answer.text());
    const tiers = ["default", "flex", "batch", "default", "priority", "batch"];
    for (let wave = 0; wave < 7; wave++) {
      await Promise.all(tiers.slice(0, 2 + (wave % 5)).map((tier, place) => send(10 * wave + place, tier)));
    }
  });
}

async function loom(browser) {
  const page = await opened(browser, WEFT_WHOLE, { colorScheme: "dark" });
  await page.goto(`${WEFT_WHOLE}/#loom`);
  await page.getByRole("table").waitFor();
  await traffic(page);
  await page.getByRole("rowheader", { name: "interactive" }).waitFor();
  const steps = page.getByRole("group", { name: /Steps of the engine/ });
  await steps.focus();
  await page.keyboard.press("ArrowLeft");
  assert.match(await page.locator(".chosen").textContent(), /^Step [\d,]+: .*(prefill|decode) .*; [\d.]+ m?s/);
  const first = await page.locator(".chosen").textContent();
  await page.keyboard.press("ArrowLeft");
  assert.notEqual(await page.locator(".chosen").textContent(), first);
  const colours = await page.locator("canvas").evaluate((canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return new Set(new Uint32Array(data.buffer)).size;
  });
  assert(colours > 5, `the canvas has ${colours} colours`);
  await page.keyboard.press("Escape");
  await steps.evaluate((group) => group.blur());
  await page.mouse.move(0, 0);
  await traffic(page);
  await picture(page, "loom");
  await page.route("**/v1/loom", async (route) => { // as with more classes than have a place of their own
    const event = await (await page.request.get(`${WEFT_WHOLE}/v1/loom?once=1`)).json();
    Object.assign(event.classes[0], { running: null, waiting: null });
    event.steps = [{ ...event.steps[0], n: 0, prefill: { "(others)": 9 }, decode: {} }];
    await route.fulfill({ contentType: "text/event-stream", body: `data: ${JSON.stringify(event)}\n\n` });
  });
  await page.reload();
  const cells = page.locator(".classes tbody tr").first().getByRole("cell");
  await cells.first().filter({ hasText: "–" }).waitFor();
  assert.equal(await cells.nth(1).textContent(), "–");
  await page.locator(".chosen").filter({ hasText: "(others)" }).waitFor();
  await steps.focus();
  await page.keyboard.press("ArrowLeft");
  await page.locator(".chosen").filter({ hasText: "Step 0: 9 prefill (others)" }).waitFor();
  return [page];
}

/** What people would see where a model answers so: the question is theirs, the request a script. */
async function engines(browser) {
  const page = await opened(browser, WEFT_WHOLE);
  await page.getByRole("link", { name: "Loom", exact: true }).click();
  await page.getByText("Prompts cached").waitFor();
  assert.equal(await page.locator(".loom").getByLabel("Model").count(), 0);
  await page.route("**/v1/models", async (route) => {
    const answer = await route.fetch();
    const body = await answer.json();
    const names = { one: "awake", two: "awake", three: "asleep" };
    body.data = Object.entries(names).map(([id, state]) => ({ ...body.data[0], id, state }));
    await route.fulfill({ response: answer, json: body });
  });
  const asked = [];
  page.on("request", (request) => asked.push(new URL(request.url())));
  await page.reload();
  const picker = page.locator(".loom").getByLabel("Model");
  await picker.waitFor();
  assert.deepEqual(await picker.locator("option").allTextContents(), ["one", "two"]);
  await accessible(page, "the loom of several models");
  await picker.selectOption("two");
  await page.waitForResponse((response) => response.url().endsWith("/v1/loom?model=two"));
  await page.getByText("Prompts cached").waitFor();
  assert.deepEqual(asked.filter((url) => url.pathname === "/v1/loom").map((url) => url.searchParams.get("model")).slice(-2), ["one", "two"]);
  return [page];
}

async function staged(page, question, text) {
  await page.route("**/v1/chat/completions", (route) => {
    const body = route.request().postDataJSON();
    body.messages.at(-1).content = say(text);
    return route.continue({ postData: JSON.stringify(body) });
  });
  await ask(page, question);
  await ended(page);
  await page.unroute("**/v1/chat/completions");
}

async function look(browser) {
  const page = await opened(browser, WEFT_SCRIPT, { colorScheme: "light" });
  const text = "<think>The scheduler plans, then the executor runs.</think>Each step takes tokens of **all classes**, in this order:\n\n1. decode tokens of interactive requests, which keep their targets\n2. as much of waiting prompts as fits into the time that is left\n3. batches, with the rest\n\n```python\ndef step(engine):\n    plan = engine.scheduler.plan()   # who gets tokens now\n    result = engine.executor.run(plan)\n    engine.scheduler.commit(result)\n```";
  await staged(page, "How does one server keep a chat fast beside a batch?", text);
  await page.locator(".hljs-keyword").first().waitFor();
  assert.equal(await page.locator("ol li").count(), 3);
  await page.mouse.move(0, 0);
  await picture(page, "chat");
  return [page];
}

async function access(browser) {
  const pages = [];
  for (const colorScheme of ["light", "dark"]) {
    const page = await opened(browser, WEFT_SCRIPT, { colorScheme });
    await accessible(page, `an empty chat, ${colorScheme}`);
    await ask(page, say("<think>Hm.</think># A\n\n[link](https://fine.example)\n\n```js\nlet x = 1; // one\n```\n\n| a |\n|---|\n| 1 |"));
    await ended(page);
    await page.getByRole("button", { name: "Options" }).click();
    await accessible(page, `a chat, ${colorScheme}`);
    await page.goto(`${WEFT_WHOLE}/#loom`);
    await page.getByRole("table").waitFor();
    await drop(page, "words.jsonl", "no JSON at all");
    await page.getByText("its first line is no JSON").waitFor();
    await accessible(page, `the loom, ${colorScheme}`);
    pages.push(page);
  }
  const page = pages[0];
  await page.goto(`${WEFT_SCRIPT}/`);
  await page.getByRole("button", { name: "Switch between light and dark" }).click();
  const paper = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const dark = await paper();
  await page.reload();
  assert.equal(await paper(), dark);
  assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), "dark");
  return pages;
}

async function phone(browser) {
  const page = await opened(browser, WEFT_SCRIPT, { viewport: PHONE, hasTouch: true, deviceScaleFactor: 2 });
  await fits(page);
  await ask(page, say(`A long word: ${"x".repeat(120)}\n\n\`\`\`python\n${"y = 1; ".repeat(30)}\n\`\`\`\n\n| ${"column | ".repeat(9)}\n|${"---|".repeat(9)}\n| ${"1 | ".repeat(9)}`));
  await ended(page);
  await fits(page);
  await page.getByRole("button", { name: "Chats" }).click();
  await page.getByRole("button", { name: "New chat" }).click();
  await staged(page, "Does a batch slow me down?", "No. It is woven into the same steps, and your chat goes first:\n\n- your tokens come **at once**\n- the batch takes what you leave free");
  await fits(page);
  await picture(page, "phone");
  await page.goto(`${WEFT_WHOLE}/#loom`);
  await page.getByRole("table").waitFor();
  await fits(page);
  return [page];
}

async function keyboard(browser) {
  const page = await opened(browser, WEFT_SCRIPT);
  await page.getByLabel("Service class").waitFor();
  const reached = new Set();
  for (let count = 0; count < 16; count++) {
    await page.keyboard.press("Tab");
    reached.add(await page.evaluate(() => {
      const at = document.activeElement;
      if (at === document.body) return "the browser";
      const ringed = getComputedStyle(at).outlineStyle !== "none" || at.matches("textarea");
      return ringed ? (at.getAttribute("aria-label") ?? at.textContent.trim()) : `no ring: ${at.outerHTML}`;
    }));
  }
  for (const name of ["Chat", "Loom", "New chat", "Message", "Model", "Service class", "Options"]) assert(reached.has(name), `${name}: ${[...reached]}`);
  assert(![...reached].some((name) => name.startsWith("no ring")), [...reached].join());
  return [page];
}

const CHECKS = {
  stream, growing, stop, key, classes, hostile, reasoning, tools, edit, chats, left, images, broken, keyboard, look, phone,
  killed, batch, faults, loom, engines, access,
};

const browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox"] });
const wanted = process.argv.slice(2);
for (const [name, check] of Object.entries(CHECKS)) {
  if (wanted.length && !wanted.includes(name)) continue;
  let fault = null;
  try {
    for (const page of await check(browser)) {
      assert.deepEqual(page.outside, [], `other hosts were asked: ${page.outside}`);
      assert.deepEqual(page.complaints, [], `the console has errors: ${page.complaints}`);
    }
  } catch (error) {
    fault = String(error.message).split("\n").slice(0, 12).join(" | ");
    if (process.env.FAULTS) {
      const page = browser.contexts().at(-1)?.pages()[0];
      await page?.screenshot({ path: `${process.env.FAULTS}/${name}.png` });
    }
  }
  await Promise.all(browser.contexts().map((context) => context.close()));
  tell({ check: name, fault });
}
await browser.close();
