// What the page knows of the server: its models, the classes that the key may use, its state.
import { getJson } from "./api.js";
import { Observed } from "./ui.js";

const LOOK_MS = 4000;
const STATES = {
  ready: "ready",
  recovering: "an engine has died; the next one is starting",
  stalled: "the engine makes no progress",
  draining: "shutting down",
  out_of_memory: "too little memory for an engine",
  unreachable: "no answer",
};

class Server extends Observed {
  models = [];
  classes = { usable: [], default: "interactive" };
  version = "";
  state = "ready";
  error = null; // of the first questions

  async start() {
    try {
      const [models, info] = await Promise.all([getJson("v1/models"), getJson("server_info")]);
      this.models = models.data;
      this.classes = info.classes;
      this.version = info.version;
      this.error = null;
    } catch (error) {
      this.error = error;
    }
    this.changed();
  }

  /** Look now and then whether requests are accepted; that needs no key. */
  watchState() {
    const look = async () => {
      if (document.hidden) return;
      const answer = await fetch("ready").then((response) => response.json()).catch(() => null);
      const before = this.state;
      this.state = answer?.status ?? "unreachable";
      if (this.state !== before) this.changed();
      if (this.error && this.state === "ready" && this.error.status === 0) this.start();
    };
    look();
    setInterval(look, LOOK_MS);
  }

  get stateInWords() {
    return STATES[this.state] ?? this.state;
  }

  model(id) {
    return this.models.find((model) => model.id === id) ?? this.models[0];
  }

  /** The models that have an engine, where the server has several; others would wake if looked at. */
  get awake() {
    return this.models.filter((model) => model.state === "awake").map((model) => model.id);
  }

  /** Whether a model says that it takes images. */
  takesImages(id) {
    return this.model(id)?.input_modalities?.includes("image") ?? false;
  }
}

export const server = new Server();
