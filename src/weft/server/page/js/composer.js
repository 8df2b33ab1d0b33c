// Where you write: text, images where a model takes them, model, class, options, send and stop.
import { useEffect, useRef, useState } from "preact/hooks";
import { chats } from "./chats.js";
import { readImage } from "./images.js";
import { server } from "./server.js";
import { html, icon, ICONS } from "./ui.js";

const MOST_PX = 240; // of the field's height

export function Composer({ chat }) {
  const area = useRef(null);
  const [text, setText] = useState("");
  const [images, setImages] = useState([]);
  const [optionsShown, showOptions] = useState(false);
  const running = chats.isRunning(chat);
  const empty = !text.trim() && !images.length;
  useEffect(() => {
    if (matchMedia("(pointer: fine)").matches) area.current.focus({ preventScroll: true });
  }, []);
  useEffect(() => {
    area.current.style.height = "auto";
    area.current.style.height = `${Math.min(MOST_PX, area.current.scrollHeight)}px`;
  }, [text]);

  const send = (event) => {
    event.preventDefault();
    if (running || empty || !server.models.length) return;
    chats.send(text, images);
    setText("");
    setImages([]);
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    if (event.key === "Escape" && running) chats.stop();
  };
  const attach = async (event) => {
    const added = await Promise.all([...event.target.files].map(readImage));
    setImages([...images, ...added.filter(Boolean)]);
    event.target.value = "";
  };
  return html`<form class="composer" onSubmit=${send}>
    <div class="column">
      ${optionsShown && html`<${Options} chat=${chat} />`}
      ${images.length > 0 && html`<ul class="attached">${images.map((url, index) => html`<li>
        <img src=${url} alt=${`Image ${index + 1}`} />
        <button type="button" class="quiet" aria-label=${`Remove image ${index + 1}`}
          onClick=${() => setImages(images.filter((_, other) => other !== index))}>${icon(ICONS.close)}</button>
      </li>`)}</ul>`}
      <div class="field">
        <textarea ref=${area} rows="1" aria-label="Message" placeholder="Write a message" value=${text}
          onInput=${(event) => setText(event.target.value)} onKeyDown=${onKey}></textarea>
        <div class="row">
          <${Pickers} chat=${chat} />
          <button type="button" class="quiet" aria-label="Options" title="Options" aria-expanded=${optionsShown}
            onClick=${() => showOptions(!optionsShown)}>${icon(ICONS.options)}</button>
          ${server.takesImages(chat.model) && html`<label class="quiet attach" title="Attach images">
            ${icon(ICONS.image)}<input type="file" accept="image/*" multiple aria-label="Attach images"
              onChange=${attach} /></label>`}
          <span class="grow"></span>
          ${running
            ? html`<button type="button" class="main round" aria-label="Stop" title="Stop (Esc)"
                onClick=${() => chats.stop()}>${icon(ICONS.stop)}</button>`
            : html`<button type="submit" class="main round" aria-label="Send" title="Send (Enter)" disabled=${empty}>
                ${icon(ICONS.send)}</button>`}
        </div>
      </div>
    </div>
  </form>`;
}

function Pickers({ chat }) {
  const { models, classes } = server;
  if (!models.length) return null;
  const choose = (name) => (event) => {
    chat[name] = event.target.value;
    chats.changed();
  };
  return html`
    <select aria-label="Model" title="Model" value=${server.model(chat.model).id} onChange=${choose("model")}>
      ${models.map((model) => html`<option key=${model.id}>${model.id}</option>`)}
    </select>
    <select aria-label="Service class" title="Service class"
      value=${classes.usable.includes(chat.class) ? chat.class : classes.default} onChange=${choose("class")}>
      ${classes.usable.map((name) => html`<option key=${name}>${name}</option>`)}
    </select>`;
}

function Options({ chat }) {
  const { options } = chat;
  const number = (event) => (event.target.value === "" ? null : Number(event.target.value));
  const set = (name, read) => (event) => {
    if (event.target.validity.valid) options[name] = read(event);
  };
  const setTools = (event) => {
    event.target.setCustomValidity(wrongTools(event.target.value));
    event.target.reportValidity();
    set("tools", () => event.target.value.trim())(event);
  };
  const plain = (event) => event.target.value;
  return html`<fieldset class="options"><legend>Options of this chat</legend>
    <label class="wide">System prompt
      <textarea rows="2" value=${options.system} onInput=${set("system", plain)}></textarea></label>
    <label>Temperature
      <input type="number" min="0" max="2" step="0.05" placeholder="the model's" value=${options.temperature ?? ""}
        onInput=${set("temperature", number)} /></label>
    <label>Most tokens of an answer
      <input type="number" min="1" step="1" placeholder="no limit" value=${options.most ?? ""}
        onInput=${set("most", number)} /></label>
    <label class="wide">Tools, as a JSON list in OpenAI's form
      <textarea rows="2" class="code" spellcheck="false" value=${options.tools} onChange=${setTools}></textarea></label>
  </fieldset>`;
}

/** What is wrong with a list of tools; "" if nothing is. */
function wrongTools(text) {
  if (!text.trim()) return "";
  try {
    return Array.isArray(JSON.parse(text)) ? "" : "This has to be a list: [ … ]";
  } catch (error) {
    return error.message;
  }
}
