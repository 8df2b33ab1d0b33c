// The loom: what the engine computes, step by step, and how it keeps its targets.
import { useEffect, useRef, useState } from "preact/hooks";
import { BatchPanel } from "./batch_panel.js";
import { LoomFeed } from "./loom_feed.js";
import { server } from "./server.js";
import { OTHERS, threadOf } from "./threads.js";
import { count, html, millis, percent, seconds, span, useObserved } from "./ui.js";
import { Weave } from "./weave.js";

export function LoomView() {
  useObserved(server);
  const [chosen, choose] = useState("");
  const awake = server.awake;
  useEffect(() => { server.start(); }, []); // models have slept and woken since
  const model = awake.includes(chosen) ? chosen : "";
  return html`<main class="loom"><div class="wide-column">
    <div class="row"><h1 class="grow">The loom</h1>
      ${awake.length > 1 && html`<select aria-label="Model" value=${model || awake[0]}
        onChange=${(event) => choose(event.target.value)}>
        ${awake.map((name) => html`<option key=${name}>${name}</option>`)}</select>`}
    </div>
    <p class="lead">Each column is one step of the engine: what it wove together, by class.</p>
    <${Woven} key=${model || awake[0]} model=${model || awake[0]} />
  </div></main>`;
}

/** What one engine computes; `model` names it where the server has several. */
function Woven({ model }) {
  const [feed] = useState(() => new LoomFeed(model));
  useObserved(feed);
  useEffect(() => {
    feed.start();
    return () => feed.stop();
  }, [feed]);
  const { latest } = feed;
  return html`
    ${feed.trouble && html`<p class="banner" role="alert">${feed.trouble}</p>`}
    ${!latest && !feed.trouble && html`<p class="small">Waiting for the first figures …</p>`}
    ${latest && html`
      <${Now} feed=${feed} />
      <${Steps} feed=${feed} />
      <${ClassTable} rows=${latest.classes} names=${feed.names} />`}
    <${BatchPanel} live=${latest?.batches ?? null} />
    ${latest && html`<${Recoveries} rows=${latest.recoveries} />`}`;
}

/** The figures of this moment. */
function Now({ feed }) {
  const { load, kv, engine, totals } = feed.latest;
  const pace = feed.pace;
  const used = kv.blocks ? kv.used_blocks / kv.blocks : 0;
  const cached = totals.prompt_tokens + totals.cached_tokens;
  const figures = [
    ["Running", count(load.running), `of ${count(engine.max_num_seqs)}`],
    ["Waiting", count(load.waiting), load.paused ? `${count(load.paused)} paused` : ""],
    ["Output", count(Math.round(feed.rate)), "tokens/s"],
    ["Step", millis(pace.ms), pace.error === null ? "" : `predicted ±${percent(pace.error)}`],
    ["KV cache", percent(used), `of ${count(kv.blocks * kv.block_size)} tokens`],
    ["Prompts cached", cached ? percent(totals.cached_tokens / cached) : "–", ""],
  ];
  return html`<dl class="now">${figures.map(([name, value, more]) => html`
    <div key=${name}><dt>${name}</dt><dd><b>${value}</b> <span>${more}</span></dd></div>`)}</dl>`;
}

function Steps({ feed }) {
  const canvas = useRef(null);
  const weave = useRef(null);
  const columns = useRef([]);
  const [chosen, choose] = useState(null);
  const { recoveries } = feed.latest;
  const { names } = feed;
  const paint = () => {
    weave.current ??= new Weave(canvas.current);
    columns.current = weave.current.paint(feed.steps, names, recoveries, chosen);
  };
  useEffect(paint);
  useEffect(() => {
    const again = () => {
      weave.current.forgetColours();
      paint();
    };
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const sized = new ResizeObserver(again);
    sized.observe(canvas.current);
    dark.addEventListener("change", again);
    addEventListener("themechange", again);
    return () => {
      sized.disconnect();
      dark.removeEventListener("change", again);
      removeEventListener("themechange", again);
    };
  }, []);
  const point = (event) => {
    const x = event.clientX - canvas.current.getBoundingClientRect().left;
    choose(columns.current.find((column) => x >= column.x - 1 && x < column.x + column.width + 1)?.step.n ?? null);
  };
  const onKey = (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") choose(null);
    if (!move || !columns.current.length) return;
    event.preventDefault();
    const at = columns.current.findIndex(({ step }) => step.n === chosen);
    const next = at < 0 ? columns.current.length - 1 : Math.min(columns.current.length - 1, Math.max(0, at + move));
    choose(columns.current[next].step.n);
  };
  const step = feed.steps.find(({ n }) => n === chosen);
  return html`<section class="steps" aria-label="Steps">
    <div class="weave" tabindex="0" role="group" aria-label="Steps of the engine; arrow keys choose one"
      onPointerMove=${point} onPointerLeave=${() => choose(null)} onKeyDown=${onKey}>
      <canvas ref=${canvas}></canvas>
      ${feed.steps.length === 0 && html`<p class="nothing">No step yet. Ask something in the chat, or drop a batch below.</p>`}
    </div>
    <p class="chosen" aria-live="polite">${step ? describe(step) : html`<${Legend} names=${names} />`}</p>
  </section>`;
}

function Legend({ names }) {
  return html`
    ${names.map((name) => html`<span class="key" key=${name}><i class=${`thread-${threadOf(name, names)}`}></i>${name}</span>`)}
    <span class="key kind"><i class="solid"></i>prefill</span><span class="key kind"><i class="dashed"></i>decode</span>
    <span class="key kind"><i class="line"></i>predicted time</span>`;
}

function describe(step) {
  const of = (counts, word) => Object.entries(counts).map(([name, tokens]) => `${count(tokens)} ${word} ${name}`);
  const parts = [...of(step.prefill, "prefill"), ...of(step.decode, "decode")];
  if (step.drafts) parts.push(`${count(step.drafts)} drafted`);
  const time = step.predicted_ms === null ? millis(step.ms) : `${millis(step.ms)}, predicted ${millis(step.predicted_ms)}`;
  return `Step ${count(step.n)}: ${parts.join(", ") || "no tokens"}; ${time}`;
}

/** How many wait or run; "–" for a class that is counted with others. */
const queued = (value) => (value === null ? "–" : count(value));

function ClassTable({ rows, names }) {
  return html`<section aria-labelledby="classes">
    <h2 id="classes">Classes</h2>
    <div class="scrolled" tabindex="0" role="region" aria-label="Table of classes"><table class="classes">
      <thead>
        <tr><th scope="col" rowspan="2">Class</th><th scope="col" rowspan="2">Running</th><th scope="col" rowspan="2">Waiting</th>
          <th scope="colgroup" colspan="3">First token</th><th scope="colgroup" colspan="3">Per further token</th>
          <th scope="col" rowspan="2">Targets kept</th></tr>
        <tr>${["first", "further"].map((of) => html`
          <th scope="col" key=${`${of}50`}>P50</th><th scope="col" key=${`${of}99`}>P99</th><th scope="col" key=${of}>target</th>`)}</tr>
      </thead>
      <tbody>${rows.map((row) => html`<tr key=${row.name}>
        <th scope="row"><i class=${`thread-${threadOf(row.running === null ? OTHERS : row.name, names)}`}></i>${row.name}</th>
        <td>${queued(row.running)}</td><td>${queued(row.waiting)}</td>
        <${Latency} of=${row.ttft_s} /><${Latency} of=${row.tpot_s} />
        <td>${row.kept === null ? "–" : html`<b class=${row.kept < 0.9 ? "over" : null}>${percent(row.kept)}</b>${" "}
          <span class="small">of ${count(row.judged)}</span>`}</td>
      </tr>`)}</tbody>
    </table></div>
    <p class="small">Of the last five minutes.</p>
  </section>`;
}

function Latency({ of }) {
  const over = of.target !== null && of.p99 !== null && of.p99 > of.target;
  return html`<td>${seconds(of.p50)}</td>
    <td class=${over ? "over" : null} title=${over ? "above the target" : null}>${seconds(of.p99)}</td>
    <td class="target">${seconds(of.target)}</td>`;
}

function Recoveries({ rows }) {
  if (!rows.length) return null;
  return html`<section aria-labelledby="recoveries">
    <h2 id="recoveries">Recoveries</h2>
    <ul class="recoveries">${rows.toReversed().map((row) => html`<li key=${row.engine}>
      <time datetime=${new Date(row.back_at * 1000).toISOString()}>${new Date(row.back_at * 1000).toLocaleTimeString()}</time>
      engine ${row.engine} took over after ${row.gap_s < 90 ? seconds(row.gap_s) : span(row.gap_s)}; open answers went on
    </li>`)}</ul>
  </section>`;
}
