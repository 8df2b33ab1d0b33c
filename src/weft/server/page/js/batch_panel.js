// Batches: dropping a file, progress with the predicted end, cancelling, results and errors.
import { useEffect, useRef, useState } from "preact/hooks";
import { getJson, postJson, request } from "./api.js";
import { Confirm, count, counted, html, saveAs, span } from "./ui.js";

const SHOWN = 20;
const LOOK_MS = 3000; // for whoever may not see the loom
const WINDOWS = ["1h", "6h", "24h", "7d"];
const HEAD_BYTES = 256 * 1024; // in which the first line of a file is looked for
const ENDED = ["completed", "failed", "expired", "cancelled"];

/** A batch object of the API, as the loom has it. */
function fromApi(batch) {
  const { total, completed, failed } = batch.request_counts;
  const end = batch.weft.predicted_end_at;
  const ended = ENDED.includes(batch.status);
  return {
    ...batch, ...batch.weft, total, completed, failed, own: true,
    progress: total ? (completed + failed) / total : 0,
    eta_s: end === null || ended ? null : Math.max(0, end - Date.now() / 1000),
    cancel: ended || batch.status === "cancelling" ? null : `/v1/batches/${batch.id}/cancel`,
  };
}

/** The batches of this key; `live` are those that the loom tells of, null without it. */
export function BatchPanel({ live }) {
  const [older, setOlder] = useState([]);
  const [trouble, setTrouble] = useState("");
  const look = () => getJson(`v1/batches?limit=${SHOWN}`)
    .then((page) => { setOlder(page.data.map(fromApi)); setTrouble(""); }, (error) => setTrouble(error.message));
  const told = live ?? [];
  const ids = told.map((batch) => batch.id);
  useEffect(() => void look(), [ids.join()]);
  useEffect(() => {
    if (live) return undefined;
    const timer = setInterval(look, LOOK_MS);
    return () => clearInterval(timer);
  }, [live === null]);
  const rows = [...older.filter((batch) => !ids.includes(batch.id)), ...told]
    .sort((a, b) => b.created_at - a.created_at).slice(0, SHOWN);
  return html`<section aria-labelledby="batches" class="batches">
    <h2 id="batches">Batches</h2>
    <${Drop} onAdded=${look} />
    ${trouble && html`<p class="wrong" role="alert">${trouble}</p>`}
    ${rows.length > 0 && html`<ul>${rows.map((batch) => html`<${Batch} key=${batch.id} batch=${batch} />`)}</ul>`}
  </section>`;
}

function Drop({ onAdded }) {
  const [over, setOver] = useState(false);
  const [busy, setBusy] = useState("");
  const [wrong, setWrong] = useState("");
  const [window_, setWindow] = useState("24h");
  const input = useRef(null);
  const take = async (file) => {
    if (!file || busy) return;
    setWrong("");
    setBusy(`Uploading ${file.name} …`);
    try {
      await submit(file, window_);
      onAdded();
    } catch (error) {
      setWrong(`${file.name}: ${error.message}`);
    }
    setBusy("");
  };
  const onDrop = (event) => {
    event.preventDefault();
    setOver(false);
    take(event.dataTransfer.files[0]);
  };
  return html`<div class=${over ? "drop over" : "drop"} onDrop=${onDrop} onDragLeave=${() => setOver(false)}
    onDragOver=${(event) => { event.preventDefault(); setOver(true); }}>
    <p>${busy || html`Drop a batch file here, or${" "}
      <button type="button" class="link" onClick=${() => input.current.click()}>choose one</button>.`}</p>
    <input ref=${input} type="file" accept=".jsonl,application/jsonl" hidden
      onChange=${(event) => { take(event.target.files[0]); event.target.value = ""; }} />
    <p class="small">A file has one request a line, as in OpenAI's API. It is computed in what interactive requests leave
      free, within${" "}
      <select aria-label="Time that the batch has" value=${window_} onChange=${(event) => setWindow(event.target.value)}>
        ${WINDOWS.map((name) => html`<option key=${name}>${name}</option>`)}</select>.</p>
    ${wrong && html`<p class="wrong" role="alert">${wrong}</p>`}
  </div>`;
}

/** Upload a file and make a batch of it; its endpoint is that of its first line. */
async function submit(file, window_) {
  const head = await file.slice(0, HEAD_BYTES).text();
  const line = head.split("\n").find((found) => found.trim());
  if (!line) throw new Error("the file is empty.");
  let first;
  try {
    first = JSON.parse(line);
  } catch {
    throw new Error("its first line is no JSON. A batch file has one request a line.");
  }
  if (typeof first?.url !== "string") throw new Error("its first line has no url, such as /v1/chat/completions.");
  const form = new FormData();
  form.append("purpose", "batch");
  form.append("file", file, file.name);
  const uploaded = await (await request("v1/files", { method: "POST", body: form })).json();
  await postJson("v1/batches", {
    input_file_id: uploaded.id, endpoint: first.url, completion_window: window_, metadata: { file: file.name.slice(0, 512) },
  });
}

function Batch({ batch }) {
  const [cancelling, setCancelling] = useState(false);
  const [whole, setWhole] = useState(null); // the API's object, once it has ended
  const [trouble, setTrouble] = useState("");
  const ended = ENDED.includes(batch.status);
  useEffect(() => {
    if (!batch.own || !batch.id.startsWith("batch_")) return;
    getJson(`v1/batches/${batch.id}`).then(setWhole, (error) => setTrouble(error.message));
  }, [batch.id, batch.own, ended]);
  const attempt = (work) => async () => {
    try {
      setTrouble("");
      await work();
    } catch (error) {
      setTrouble(error.message);
    }
  };
  const fetchFile = (id, name) => attempt(async () => {
    const response = await request(`v1/files/${id}/content`);
    saveAs(name, await response.blob());
  });
  const name = whole?.metadata?.file ?? batch.id;
  return html`<li class="batch">
    <div class="row">
      <b class="name">${name}</b><span class="small">${batch.status.replace("_", " ")}, ${batch.service_class}</span>
      <span class="grow"></span>
      ${whole?.output_file_id && html`<button type="button" onClick=${fetchFile(whole.output_file_id, `${batch.id}.jsonl`)}>
        Results</button>`}
      ${whole?.error_file_id && html`<button type="button" onClick=${fetchFile(whole.error_file_id, `${batch.id}-errors.jsonl`)}>
        Errors</button>`}
      ${batch.cancel && html`<button type="button" onClick=${() => setCancelling(true)}>Cancel</button>`}
    </div>
    ${batch.status !== "failed" && html`<progress max="1" value=${batch.progress} aria-label=${`Progress of ${name}`}></progress>`}
    <p class="small">${progressInWords(batch, ended)}</p>
    ${batch.warning && html`<p class="small over">${batch.warning}</p>`}
    ${whole?.errors && html`<ul class="faults">${whole.errors.data.map((fault) => html`
      <li>${fault.line ? html`<b>Line ${fault.line}:</b> ` : ""}${fault.message}</li>`)}</ul>`}
    ${trouble && html`<p class="wrong" role="alert">${trouble}</p>`}
    ${cancelling && html`<${Confirm} question=${`Cancel ${name}? Lines that are answered are kept.`} action="Cancel the batch"
      onYes=${attempt(() => request(batch.cancel.slice(1), { method: "POST" }))} onClose=${() => setCancelling(false)} />`}
  </li>`;
}

function progressInWords(batch, ended) {
  if (batch.status === "failed") return "Nothing was computed: the file has faults.";
  const parts = [`${count(batch.completed + batch.failed)} of ${counted(batch.total, "line")}`];
  if (batch.failed) parts.push(`${count(batch.failed)} with errors`);
  if (!ended && batch.eta_s !== null) parts.push(`done in about ${span(batch.eta_s)}`);
  return parts.join(" · ");
}
