// The chat: the list of chats, the messages of the open one, and where you write.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { asMarkdown, chats } from "./chats.js";
import { Composer } from "./composer.js";
import { Answer, Output, Question } from "./messages.js";
import { server } from "./server.js";
import { Confirm, html, icon, ICONS, saveAs, useObserved } from "./ui.js";

const NEAR_PX = 80; // of the end: whoever reads there sees what comes

export function ChatView() {
  useObserved(chats);
  useObserved(server);
  const [listed, setListed] = useState(false);
  const chat = chats.open;
  if (!chat) return html`<main class="chat"></main>`;
  const show = (other) => {
    chats.show(other);
    setListed(false);
  };
  return html`<div class="chats">
    <aside class=${listed ? "list shown" : "list"} aria-label="Chats">
      <button type="button" class="new" onClick=${() => { chats.begin(); setListed(false); }}>
        ${icon(ICONS.add)} New chat
      </button>
      <ul>${chats.all.map((other) => html`<li key=${other.id}>
        <button type="button" aria-current=${other === chat ? "true" : null} onClick=${() => show(other)}>
          ${chats.isRunning(other) && html`<span class="pulse" aria-label="being answered"></span>`}${other.title}
        </button></li>`)}
      </ul>
      <p class="small">${chats.kept
        ? "Chats are kept in this browser only."
        : "This browser keeps no chats: they are gone when you leave."}</p>
    </aside>
    <main class="chat">
      <${ChatHead} chat=${chat} listed=${listed} onList=${() => setListed(!listed)} />
      <${Transcript} chat=${chat} key=${chat.id} />
      <${Composer} chat=${chat} key=${`composer-${chat.id}`} />
    </main>
  </div>`;
}

function ChatHead({ chat, listed, onList }) {
  const [deleting, setDeleting] = useState(false);
  const name = chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "chat";
  const filled = chat.messages.length > 0;
  return html`<div class="chat-head">
    <button type="button" class="quiet lister" aria-label="Chats" aria-expanded=${listed} onClick=${onList}>
      ${icon(ICONS.menu)}
    </button>
    <h1>${chat.title || "New chat"}</h1>
    ${filled && html`
      <button type="button" class="quiet" onClick=${() => saveAs(`${name}.md`, asMarkdown(chat), "text/markdown")}
        aria-label="Save as Markdown" title="Save as Markdown">${icon(ICONS.down)}<span>Markdown</span></button>
      <button type="button" class="quiet" aria-label="Save as JSON" title="Save as JSON"
        onClick=${() => saveAs(`${name}.json`, JSON.stringify(chat, null, 2), "application/json")}>
        ${icon(ICONS.down)}<span>JSON</span></button>
      <button type="button" class="quiet" aria-label="Delete this chat" title="Delete this chat"
        onClick=${() => setDeleting(true)}>${icon(ICONS.trash)}</button>`}
    ${deleting && html`<${Confirm} question=${`Delete “${chat.title}”? It is kept nowhere else.`} action="Delete"
      onYes=${() => chats.delete(chat)} onClose=${() => setDeleting(false)} />`}
  </div>`;
}

function Transcript({ chat }) {
  const box = useRef(null);
  const follows = useRef(true);
  useLayoutEffect(() => {
    if (follows.current) box.current.scrollTop = box.current.scrollHeight;
  });
  useEffect(() => {
    const grown = new ResizeObserver(() => {
      if (follows.current && box.current) box.current.scrollTop = box.current.scrollHeight;
    });
    grown.observe(box.current.firstElementChild);
    return () => grown.disconnect();
  }, []);
  const onScroll = () => {
    const { scrollTop, scrollHeight, clientHeight } = box.current;
    follows.current = scrollHeight - scrollTop - clientHeight < NEAR_PX;
  };
  const running = chats.isRunning(chat);
  return html`<div class="transcript" ref=${box} onScroll=${onScroll} tabindex="0" role="log" aria-label="Messages"
    aria-live="polite" aria-busy=${running}>
    <div class="column">
      ${chat.messages.length === 0 && html`<${Welcome} />`}
      ${chat.messages.map((message, index) => html`<${View} key=${index} chat=${chat} message=${message} index=${index}
        running=${running} last=${index === chat.messages.length - 1} />`)}
    </div>
  </div>`;
}

function View(props) {
  const { role } = props.message;
  if (role === "user") return html`<${Question} ...${props} />`;
  return role === "tool" ? html`<${Output} ...${props} />` : html`<${Answer} ...${props} />`;
}

function Welcome() {
  if (server.error) {
    return html`<section class="welcome">
      <h2>No answer yet</h2>
      <p class="wrong" role="alert">${server.error.message}</p>
      <button type="button" onClick=${() => server.start()}>Try again</button>
    </section>`;
  }
  const model = server.models[0];
  if (!model) return null;
  return html`<section class="welcome">
    <h2>Ask ${server.models.length === 1 ? html`<code>${model.id}</code>` : "a model"} something</h2>
    <p>Its requests run beside all others of this server, in the class that you choose below.${" "}
      The <a href="#loom">loom</a> shows them, step by step.</p>
  </section>`;
}
