// The chats of this browser: which is open, which are being answered, and what may be done to them.
import { newId, readChats, removeChat, writeChat } from "./store.js";
import { server } from "./server.js";
import { bodyOf, newAnswer, takeTurn } from "./turn.js";
import { Observed } from "./ui.js";

const SAVE_MS = 1000; // between two savings of an answer that grows
const TITLE_CHARS = 60;
const NO_OPTIONS = { system: "", temperature: null, most: null, tools: "" };

class Chats extends Observed {
  all = []; // newest first
  open = null;
  kept = true; // false: this browser keeps nothing, e.g. in a private window
  #running = new Map(); // chat id -> AbortController
  #places = new WeakMap(); // chat -> where it is kept: a tab keeps a copy of what another one has changed

  async load() {
    try {
      this.all = (await readChats()).sort((a, b) => b.changed - a.changed);
    } catch {
      this.kept = false;
    }
    for (const chat of this.all) {
      this.#places.set(chat, { id: chat.id, changed: chat.changed });
      chat.messages.forEach(endUnfinished);
    }
    const last = this.all.find((chat) => chat.id === sessionStorage.getItem("weft-chat"));
    if (last) this.show(last);
    else this.begin();
  }

  /** Open an empty chat; it is kept once it has a message. */
  begin() {
    const like = this.open ?? this.all[0];
    this.show({
      id: newId(),
      title: "",
      changed: Date.now(),
      model: like?.model ?? "",
      class: like?.class ?? "",
      options: { ...NO_OPTIONS },
      messages: [],
    });
  }

  show(chat) {
    this.open = chat;
    sessionStorage.setItem("weft-chat", this.#place(chat).id);
    this.changed();
  }

  #place(chat) {
    if (!this.#places.has(chat)) this.#places.set(chat, { id: chat.id });
    return this.#places.get(chat);
  }

  isRunning(chat) {
    return this.#running.has(chat.id);
  }

  /** Choose among what the server has now: a chat may be older than its models and keys. */
  settle(chat) {
    chat.model = server.model(chat.model)?.id ?? chat.model;
    if (!server.classes.usable.includes(chat.class)) chat.class = server.classes.default;
  }

  async send(content, images = []) {
    const chat = this.open;
    if (this.isRunning(chat)) return;
    chat.messages.push({ role: "user", content, ...(images.length && { images }) });
    chat.title ||= content.trim().replace(/\s+/g, " ").slice(0, TITLE_CHARS) || "Image";
    await this.#answer(chat);
  }

  /** Answer again from a message on: the answer at `index`, or the one that follows a question. */
  async retry(index) {
    const chat = this.open;
    if (this.isRunning(chat)) return;
    chat.messages.length = chat.messages[index].role === "assistant" ? index : index + 1;
    await this.#answer(chat);
  }

  async edit(index, content) {
    if (this.isRunning(this.open)) return; // an answer was asked for while the text was edited
    this.open.messages[index].content = content;
    await this.retry(index);
  }

  /** Give the output of a tool; the model goes on when each call has one. */
  async giveOutput(call, content) {
    const chat = this.open;
    const answer = chat.messages.findLast((message) => message.calls?.some(({ id }) => id === call));
    if (this.isRunning(chat) || answer !== lastAnswer(chat)) return; // something else was asked meanwhile
    chat.messages.push({ role: "tool", call, content });
    const given = new Set(chat.messages.filter((message) => message.role === "tool").map((message) => message.call));
    if (answer.calls.every(({ id }) => given.has(id))) await this.#answer(chat);
    else await this.#save(chat);
  }

  stop(chat = this.open) {
    this.#running.get(chat.id)?.abort();
  }

  async delete(chat) {
    this.stop(chat);
    this.all = this.all.filter((other) => other !== chat);
    if (this.kept) await removeChat(this.#place(chat).id);
    if (this.open === chat) this.begin();
    this.changed();
  }

  async #answer(chat) {
    this.settle(chat);
    const controller = new AbortController();
    this.#running.set(chat.id, controller);
    const body = bodyOf(chat);
    const answer = newAnswer();
    chat.messages.push(answer);
    this.all = [chat, ...this.all.filter((other) => other !== chat)];
    this.#save(chat);
    const saving = setInterval(() => this.#save(chat), SAVE_MS);
    await takeTurn(body, answer, controller.signal, () => this.#soon());
    clearInterval(saving);
    this.#running.delete(chat.id);
    await this.#save(chat);
  }

  async #save(chat) {
    chat.changed = Date.now();
    this.changed();
    if (!this.kept || !this.all.includes(chat)) return;
    try {
      await writeChat(structuredClone(chat), this.#place(chat));
      if (this.open === chat) sessionStorage.setItem("weft-chat", this.#place(chat).id);
    } catch {
      this.kept = false;
      this.changed();
    }
  }

  #frame = 0;

  /** Render at most once a frame, however many tokens come. */
  #soon() {
    this.#frame ||= setTimeout(() => {
      this.#frame = 0;
      this.changed();
    }, 33);
  }
}

/** The answer that the chat has come to. */
export const lastAnswer = (chat) => chat.messages.findLast((message) => message.role === "assistant");

/** An answer that was growing when the page was left grows no more. */
function endUnfinished(message) {
  if (!message.open) return;
  message.open = false;
  message.note = "The page was left before the end of this answer.";
}

/** A chat as Markdown. */
export function asMarkdown(chat) {
  const parts = chat.messages.map((message) => {
    if (message.role === "tool") return `**Output of ${message.call}**\n\n\`\`\`\n${message.content}\n\`\`\``;
    const calls = (message.calls ?? []).map((call) => `\`\`\`\n${call.name}(${call.input})\n\`\`\``);
    return [message.role === "user" ? "## You" : `## ${chat.model}`, message.content, ...calls].join("\n\n");
  });
  return `# ${chat.title}\n\n${parts.join("\n\n")}\n`;
}

export const chats = new Chats();
