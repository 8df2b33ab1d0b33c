// One message: a question, an answer with its reasoning and tool calls, or the output of a tool.
import { useEffect, useRef, useState } from "preact/hooks";
import { chats, lastAnswer } from "./chats.js";
import { copyText, render } from "./markdown.js";
import { counted, html, icon, ICONS, millis } from "./ui.js";

const RENDER_MS = 60; // least time between two renderings of a text that grows
const SHARE = 4; // of the time goes into rendering one part in so many

export function Question({ message, index, running }) {
  const [editing, setEditing] = useState(false);
  if (editing) return html`<${Editor} text=${message.content} onClose=${() => setEditing(false)}
    onDone=${(text) => { setEditing(false); chats.edit(index, text); }} />`;
  return html`<article class="question" aria-label="You">
    ${(message.images ?? []).map((url) => html`<img src=${url} alt="Attached" />`)}
    <p>${message.content}</p>
    <div class="deeds">
      <button type="button" class="quiet" disabled=${running} onClick=${() => setEditing(true)} aria-label="Edit"
        title="Edit and ask again">${icon(ICONS.edit)}</button>
    </div>
  </article>`;
}

function Editor({ text, onDone, onClose }) {
  const area = useRef(null);
  useEffect(() => area.current.focus(), []);
  const submit = (event) => {
    event.preventDefault();
    if (area.current.value.trim()) onDone(area.current.value);
  };
  const onKey = (event) => {
    if (event.key === "Escape") onClose();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  return html`<form class="editor" onSubmit=${submit}>
    <textarea ref=${area} rows="3" aria-label="Your message" onKeyDown=${onKey}>${text}</textarea>
    <p class="small">What follows this message is replaced.</p>
    <div class="row end">
      <button type="button" onClick=${onClose}>Cancel</button>
      <button type="submit" class="main">Ask again</button>
    </div>
  </form>`;
}

export function Answer({ chat, message, index, running, last }) {
  const waiting = message.open && !message.content && !message.reasoning && !message.calls.length;
  const thinking = message.open && message.reasoning && !message.content;
  return html`<article class="answer" aria-label="Answer">
    ${waiting && html`<p class="waiting" aria-label="Waiting for the first token"><i></i><i></i><i></i></p>`}
    ${message.reasoning && html`<details class="reasoning">
      <summary>${thinking ? "Thinking …" : "Reasoning"}</summary>
      <p>${message.reasoning}</p>
    </details>`}
    ${message.content && html`<${Markdown} text=${message.content} finished=${!message.open} />`}
    ${message.calls.map((call) => html`<${Call} key=${call.id} call=${call} chat=${chat}
      open=${!running && message === lastAnswer(chat)} />`)}
    ${message.note && html`<p class=${message.failed ? "note wrong" : "note"} role=${message.failed ? "alert" : null}>
      ${message.note}</p>`}
    ${!message.open && html`<div class="deeds">
      ${message.content && html`<${CopyButton} text=${message.content} />`}
      <button type="button" class="quiet" disabled=${running} onClick=${() => chats.retry(index)}
        aria-label="Answer again" title=${last ? "Answer again" : "Answer again; what follows is dropped"}>
        ${icon(ICONS.retry)}</button>
      <${Figures} figures=${message.figures} />
    </div>`}
  </article>`;
}

function CopyButton({ text }) {
  const said = useRef(null);
  return html`<button type="button" class="quiet" title="Copy" onClick=${() => copyText(text, said.current)}>
    ${icon(ICONS.copy)}<span class="only-read" ref=${said} aria-live="polite">Copy</span></button>`;
}

/** Times as this browser has seen them. */
function Figures({ figures }) {
  const parts = [];
  if (figures.ttft_ms !== undefined) parts.push(["TTFT", millis(figures.ttft_ms), "Time to the first token"]);
  if (figures.tpot_ms !== undefined) parts.push(["TPOT", millis(figures.tpot_ms), "Time per further token"]);
  if (figures.tokens !== undefined) parts.push(["", counted(figures.tokens, "token"), "Length of the answer"]);
  if (figures.class) parts.push(["", figures.class, "Service class"]);
  if (figures.end === "length") parts.push(["", "cut at the limit of tokens", "The answer was not at its end"]);
  return html`<p class="figures">${parts.map(([name, value, title]) => html`
    <span title=${title}>${name && html`<b>${name}</b> `}${value}</span>`)}</p>`;
}

/** Text as Markdown. While it grows it is rendered now and then: each time costs more. */
function Markdown({ text, finished }) {
  const box = useRef(null);
  const state = useRef({ shown: null, due: 0, timer: 0 });
  useEffect(() => {
    const own = state.current;
    const show = () => {
      own.timer = 0;
      const start = performance.now();
      box.current?.replaceChildren(render(own.text, own.finished));
      const took = performance.now() - start;
      own.due = start + took + Math.max(RENDER_MS, SHARE * took);
    };
    Object.assign(own, { text, finished });
    if (finished) {
      clearTimeout(own.timer);
      show();
    } else {
      own.timer ||= setTimeout(show, Math.max(0, own.due - performance.now()));
    }
  }, [text, finished]);
  useEffect(() => () => clearTimeout(state.current.timer), []);
  return html`<div class="prose" ref=${box}></div>`;
}

/** A tool call; while it is `open`, you can give the tool's output. */
function Call({ call, chat, open }) {
  const given = chat.messages.some((message) => message.role === "tool" && message.call === call.id);
  const submit = (event) => {
    event.preventDefault();
    chats.giveOutput(call.id, event.target.elements.output.value);
  };
  return html`<section class="call" aria-label=${`Tool call: ${call.name}`}>
    <h3>${call.name}</h3>
    <pre tabindex="0" role="region" aria-label="Arguments"><code>${indented(call.input)}</code></pre>
    ${open && !given && html`<form onSubmit=${submit}>
      <label>Output of the tool<textarea name="output" rows="2" required></textarea></label>
      <div class="row end"><button type="submit">Give to the model</button></div>
    </form>`}
  </section>`;
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // it is not complete yet, or no JSON
  }
}

export function Output({ message }) {
  return html`<article class="output" aria-label="Output of a tool">
    <h3>Output</h3><pre tabindex="0" role="region" aria-label="Output"><code>${message.content}</code></pre>
  </article>`;
}
