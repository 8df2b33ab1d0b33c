// What the server says of its engine, four times a second: the latest event, and the steps so far.
import { events, request } from "./api.js";
import { Observed } from "./ui.js";

const MOST_STEPS = 512; // more fit no window
const RATE_S = 5; // over which tokens per second are counted
const AGAIN_MS = [500, 1000, 2000, 5000]; // until the next try, after so many in a row

export class LoomFeed extends Observed {
  latest = null;
  steps = [];
  trouble = "";
  #controller = new AbortController();
  #marks = []; // of the output tokens lately
  #path = "v1/loom";

  /** `model` names the engine where the server has several. */
  constructor(model) {
    super();
    if (model) this.#path += `?model=${encodeURIComponent(model)}`;
  }

  /** Follow the stream until `stop`; a stream that ends is asked for again. */
  async start() {
    const { signal } = this.#controller;
    for (let failures = 0; !signal.aborted; ) {
      try {
        const response = await request(this.#path, { signal, headers: { accept: "text/event-stream" } });
        let first = true;
        for await (const event of events(response)) {
          if (event.object === "loom.end") break;
          this.#take(event, first);
          first = false;
          failures = 0;
        }
        this.trouble = "The server has ended the stream; asking again.";
      } catch (error) {
        if (signal.aborted) return;
        this.trouble = error.message;
        if (error.status === 401 || error.status === 403 || error.status === 404) {
          this.changed();
          return;
        }
      }
      this.changed();
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS[Math.min(failures++, AGAIN_MS.length - 1)]));
    }
  }

  stop() {
    this.#controller.abort();
  }

  #take(event, first) {
    const known = this.steps.at(-1)?.n ?? -1; // the first step is 0
    const newest = event.steps.at(-1)?.n ?? -1;
    const anew = first && newest < known; // another server than before
    const fresh = anew ? event.steps : event.steps.filter((step) => step.n > known);
    this.steps = [...(anew ? [] : this.steps), ...fresh].slice(-MOST_STEPS);
    this.latest = event;
    this.trouble = "";
    this.#count(event);
    this.changed();
  }

  #count({ at, totals, engine }) {
    const engineOf = engine.number;
    this.#marks.push({ at, tokens: totals.output_tokens, engine: engineOf });
    this.#marks = this.#marks.filter((mark) => mark.engine === engineOf && mark.at > at - RATE_S);
  }

  /** What steps are counted by: the classes that have a place of their own, and `(others)` for all the rest. */
  get names() {
    const counted = this.steps.flatMap((step) => [...Object.keys(step.prefill), ...Object.keys(step.decode)]);
    const placed = this.latest.classes.filter((row) => row.running !== null);
    return [...new Set([...placed.map((row) => row.name), ...counted])];
  }

  /** Output tokens per second, lately. */
  get rate() {
    const first = this.#marks[0];
    const last = this.#marks.at(-1);
    return last && last.at > first.at ? (last.tokens - first.tokens) / (last.at - first.at) : 0;
  }

  /** The median time of the last steps, and by how much predictions missed it; null without any. */
  get pace() {
    const recent = this.steps.slice(-64);
    const predicted = recent.filter((step) => step.predicted_ms !== null && step.ms > 0);
    return {
      ms: median(recent.map((step) => step.ms)),
      error: median(predicted.map((step) => Math.abs(step.predicted_ms - step.ms) / step.ms)),
    };
  }
}

function median(values) {
  const sorted = values.toSorted((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}
