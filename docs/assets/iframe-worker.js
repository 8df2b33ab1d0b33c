// Lets the search of a site that is opened from a folder run in a frame, as browsers allow no worker there.
"use strict";

class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    const inside = this.frame.contentWindow;
    window.addEventListener("message", (event) => {
      if (event.source !== inside) return;
      const told = new MessageEvent("message", { data: event.data });
      this.dispatchEvent(told);
      if (this.onmessage) this.onmessage(told);
    });
    this.ready = this.fill(url);
  }

  // Gives the frame what a worker has, then its script.
  async fill(url) {
    const inside = this.frame.contentWindow;
    const load = (source) =>
      new Promise((loaded, failed) => {
        const script = inside.document.createElement("script");
        script.onload = loaded;
        script.onerror = failed;
        script.src = new URL(source, document.baseURI);
        inside.document.body.append(script);
      });
    inside.document.write(
      "<body><script>postMessage = (data) => parent.postMessage(data, '*')</" + "script></body>",
    );
    inside.document.close();
    inside.importScripts = async (...sources) => {
      for (const source of sources) await load(source);
    };
    await load(url);
  }

  async postMessage(data) {
    await this.ready;
    const inside = this.frame.contentWindow;
    inside.dispatchEvent(new inside.MessageEvent("message", { data: structuredClone(data) }));
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
