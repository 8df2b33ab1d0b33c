// What all views share: templates, observed objects, dialogs, and how figures are written.
import { h } from "preact";
import { useEffect, useReducer, useRef } from "preact/hooks";
import htm from "htm";

export const html = htm.bind(h);

/** An object that views watch: `changed()` renders them again. */
export class Observed {
  #watchers = new Set();

  watch(watcher) {
    this.#watchers.add(watcher);
    return () => this.#watchers.delete(watcher);
  }

  changed() {
    for (const watcher of this.#watchers) watcher();
  }
}

/** Render this component again whenever an observed object changes. */
export function useObserved(observed) {
  const [, again] = useReducer((count) => count + 1, 0);
  useEffect(() => observed.watch(again), [observed]);
}

/** A modal dialog; `onClose` is called however it is closed. */
export function Dialog({ label, onClose, children }) {
  const dialog = useRef(null);
  useEffect(() => {
    const shown = dialog.current;
    shown.showModal();
    return () => shown.close();
  }, []);
  return html`<dialog ref=${dialog} aria-label=${label} onCancel=${(event) => {
    event.preventDefault();
    onClose();
  }}>${children}</dialog>`;
}

/** A question with one button that does what it says. */
export function Confirm({ question, action, onYes, onClose }) {
  return html`<${Dialog} label=${question} onClose=${onClose}>
    <p>${question}</p>
    <div class="row end">
      <button type="button" onClick=${onClose}>Cancel</button>
      <button type="button" class="danger" onClick=${() => { onYes(); onClose(); }}>${action}</button>
    </div>
  </${Dialog}>`;
}

/** Offer some text or bytes as a file. */
export function saveAs(name, content, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const whole = new Intl.NumberFormat("en");

export const count = (value) => whole.format(value);

/** "3 lines", "1 line". */
export const counted = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

/** Milliseconds with three digits that mean something: 0.42 ms, 4.2 ms, 420 ms, 4.2 s. */
export function millis(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms >= 999.5) return `${(ms / 1000).toFixed(ms < 9995 ? 2 : 1)} s`;
  return `${ms.toFixed(ms < 1 ? 2 : ms < 99.5 ? 1 : 0)} ms`;
}

export const seconds = (s) => millis(s === null || s === undefined ? null : s * 1000);

/** A span as people say it: 8 s, 3 min, 2 h 5 min. */
export function span(s) {
  if (s < 90) return `${Math.max(1, Math.round(s))} s`;
  const minutes = Math.round(s / 60);
  if (minutes < 90) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const percent = (share) => `${(share * 100).toFixed(share > 0.995 || share < 0.1 ? 1 : 0)}%`;

/** An icon of 16 by 16, by the path of its lines. */
export const icon = (path) => html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true"><path d=${path} /></svg>`;
export const ICONS = {
  add: "M8 3v10M3 8h10",
  close: "M4 4l8 8M12 4l-8 8",
  copy: "M6 6h7v7H6zM3 10V3h7",
  down: "M8 3v8M4.5 8L8 11.5 11.5 8M3 13.5h10",
  edit: "M3 13l.7-3L10.5 3.2l2.3 2.3L6 12.3z",
  image: "M2.5 3h11v10h-11zM2.5 11l3.5-3.5 2.5 2.5 2-2 3 3M10 6.2h.1",
  menu: "M2.5 4.5h11M2.5 8h11M2.5 11.5h11",
  options: "M2.5 5h6M12 5h1.5M10.2 3.2v3.6M2.5 11h1.5M7.5 11h6M5.8 9.2v3.6",
  retry: "M13 8a5 5 0 1 1-1.6-3.7M13 2.5V5h-2.6",
  send: "M8 13V3.5M4 7.2l4-4 4 4",
  stop: "M4.5 4.5h7v7h-7z",
  theme: "M8 2.5v11a5.5 5.5 0 0 0 0-11zM8 2.5a5.5 5.5 0 0 0 0 11",
  trash: "M3 4.5h10M6.5 4.5v-2h3v2M4.5 4.5l.6 9h5.8l.6-9",
};
