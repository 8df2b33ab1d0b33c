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
export const writeChat = (chat) => inTable("readwrite", (table) => table.put(chat));
export const removeChat = (id) => inTable("readwrite", (table) => table.delete(id));
