// The page: its head, the key dialog, and the view that the address names.
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { keyDesk } from "./api.js";
import { ChatView } from "./chat_view.js";
import { chats } from "./chats.js";
import { LoomView } from "./loom_view.js";
import { server } from "./server.js";
import { Dialog, html, icon, ICONS, useObserved } from "./ui.js";

const VIEWS = { chat: "Chat", loom: "Loom" };
const named = () => (location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "chat");

function App() {
  const [view, setView] = useState(named());
  useEffect(() => {
    const turn = () => setView(named());
    addEventListener("hashchange", turn);
    return () => removeEventListener("hashchange", turn);
  }, []);
  useEffect(() => void (document.title = `${VIEWS[view]} · weft`), [view]);
  return html`
    <${Head} view=${view} />
    ${view === "loom" ? html`<${LoomView} />` : html`<${ChatView} />`}
    <${KeyDialog} />`;
}

function Head({ view }) {
  useObserved(server);
  const well = server.state === "ready";
  return html`<header class="head">
    <a class="brand" href="#chat"><img src="page/icon.svg" alt="" width="22" height="22" />weft</a>
    <nav aria-label="Views">
      ${Object.entries(VIEWS).map(([name, label]) => html`
        <a href=${`#${name}`} aria-current=${name === view ? "page" : null}>${label}</a>`)}
    </nav>
    <p class=${well ? "state well" : "state"} role="status">
      <span class="words">${well ? `weft ${server.version}` : server.stateInWords}</span>
    </p>
    <button type="button" class="quiet" aria-label="Switch between light and dark" onClick=${switchTheme}>
      ${icon(ICONS.theme)}
    </button>
  </header>`;
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("weft-theme", root.dataset.theme);
  dispatchEvent(new Event("themechange"));
}

function KeyDialog() {
  useObserved(keyDesk);
  if (keyDesk.wrong === null) return null;
  const give = (event) => {
    event.preventDefault();
    const key = event.target.elements.key.value.trim();
    if (key) keyDesk.give(key);
  };
  return html`<${Dialog} label="API key" onClose=${() => keyDesk.refuse()}>
    <form onSubmit=${give}>
      <h2>This server needs a key</h2>
      <p id="key-note">It stays in this tab, and is gone when you close it.</p>
      <label for="key">API key</label>
      <input id="key" name="key" type="password" autocomplete="off" required pattern="[\\x21-\\x7e]+"
        title="Letters, digits and signs without spaces" aria-describedby="key-note key-wrong" autofocus />
      <p id="key-wrong" class="wrong" role="alert">${keyDesk.wrong ? "The server refused that key." : ""}</p>
      <div class="row end">
        <button type="button" onClick=${() => keyDesk.refuse()}>Cancel</button>
        <button type="submit" class="main">Use this key</button>
      </div>
    </form>
  </${Dialog}>`;
}

render(html`<${App} />`, document.getElementById("app"));
server.watchState();
server.start();
chats.load();
