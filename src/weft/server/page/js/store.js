// Keeps chats in this browser (IndexedDB); nothing of them is kept on the server.
const TABLE = "chats";

let opened = null;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open("weft", 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(TABLE, { keyPath: "id" });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  return opened;
}

async function inTable(mode, work) {
  const transaction = (await database()).transaction(TABLE, mode);
  return new Promise((resolve, reject) => {
    const asked = work(transaction.objectStore(TABLE));
    transaction.oncomplete = () => resolve(asked.result);
    transaction.onabort = () => reject(transaction.error);
    transaction.onerror = () => reject(transaction.error);
  });
}

export const readChats = () => inTable("readonly", (table) => table.getAll());

/** An id that no chat has yet. */
export const newId = () => crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;

/**
 * Write a chat at its place: an id, and when what is there was changed, as far as this tab knows.
 * Where another tab has changed it since, that stays, and the place becomes one of its own.
 */
export const writeChat = (chat, place) => inTable("readwrite", (table) => {
  const { id } = place;
  const asked = table.get(id);
  asked.onsuccess = () => {
    const others = asked.result !== undefined && asked.result.changed !== place.changed;
    if (others && place.id === id) place.id = newId();
    place.changed = chat.changed;
    table.put({ ...chat, id: place.id });
  };
  return asked;
});
export const removeChat = (id) => inTable("readwrite", (table) => table.delete(id));
