// Requests to the server that serves this page: its key, its errors, its streams of events.
import { Observed } from "./ui.js";

const KEY = "weft-key"; // in the session's storage: gone with the tab

/** What the server answered, or that there was no answer (status 0). */
export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Asks for the key: `wrong` is null while none is needed, and says whether one was refused. */
class KeyDesk extends Observed {
  wrong = null;
  #waiting = [];

  /** Resolves when there is another key than the one that was refused. */
  obtain(refused) {
    if ((sessionStorage.getItem(KEY) ?? "") !== refused) return Promise.resolve();
    this.wrong = refused !== "";
    this.changed();
    return new Promise((resolve, reject) => this.#waiting.push({ resolve, reject }));
  }

  give(key) {
    sessionStorage.setItem(KEY, key);
    this.#end((waiting) => waiting.resolve());
  }

  refuse() {
    this.#end((waiting) => waiting.reject(new ApiError("The server needs an API key.", 401, "invalid_api_key")));
  }

  #end(tell) {
    this.wrong = null;
    this.#waiting.splice(0).forEach(tell);
    this.changed();
  }
}

export const keyDesk = new KeyDesk();

/** Fetch a path of this server; asks for a key where one is needed. Throws ApiError. */
export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY) ?? "";
    const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
    const response = await reach(path, { ...options, headers });
    if (response.status === 401) {
      await keyDesk.obtain(key);
    } else if (response.ok) {
      return response;
    } else {
      throw await errorOf(response);
    }
  }
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is it still running?", 0, "unreachable");
  }
}

async function errorOf(response) {
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The server answered ${response.status}.`;
  return new ApiError(message, response.status, body?.error?.code);
}

export const getJson = async (path, options) => (await request(path, options)).json();

export function postJson(path, body, options = {}) {
  const headers = { "content-type": "application/json" };
  return request(path, { method: "POST", headers, body: JSON.stringify(body), ...options });
}

/** The JSON of each server-sent event of an answer, until the stream or `[DONE]` ends it. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
        if (data[0] === "[DONE]") return;
        if (data.length) yield JSON.parse(data.join("\n"));
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection to the server broke off.", 0, "broken");
  } finally {
    await reader.cancel().catch(() => {});
  }
}
