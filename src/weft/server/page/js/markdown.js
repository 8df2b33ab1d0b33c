// Markdown of models as safe elements: sanitised, without anything that loads, code highlighted.
import DOMPurify from "dompurify";
import hljs from "highlight.js";
import { marked } from "marked";

const TAGS = (
  "a blockquote br code del details em h1 h2 h3 h4 h5 h6 hr img kbd li ol p pre s strong sub summary sup " +
  "table tbody td th thead tr ul"
).split(" ");
const RULES = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "src", "alt", "title", "class", "start", "align", "open"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
// The languages in vendor/highlight/languages, and other names for them.
const LANGUAGES = new Set((
  "bash c cpp csharp css diff dockerfile go ini java javascript json kotlin lua makefile markdown php python " +
  "r ruby rust scala sql swift typescript xml yaml"
).split(" "));
const ALIASES = {
  "c++": "cpp", console: "bash", cs: "csharp", docker: "dockerfile", golang: "go", html: "xml", js: "javascript",
  jsonc: "json", jsx: "javascript", md: "markdown", py: "python", rb: "ruby", rs: "rust", sh: "bash", shell: "bash",
  svg: "xml", toml: "ini", ts: "typescript", tsx: "typescript", yml: "yaml", zsh: "bash",
};

marked.use({ gfm: true, renderer: { checkbox: ({ checked }) => (checked ? "☑ " : "☐ ") } });

/** The elements of some Markdown; code of unfinished texts is not highlighted yet. */
export function render(text, finished) {
  let fragment;
  try {
    fragment = DOMPurify.sanitize(marked.parse(text), RULES);
  } catch { // it is nested more deeply than the parser goes
    return asItIs(text);
  }
  for (const styled of fragment.querySelectorAll("[class]:not(pre > code)")) styled.removeAttribute("class");
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  fragment.querySelectorAll("img").forEach(imageAsLink);
  for (const table of fragment.querySelectorAll("table")) {
    const box = document.createElement("div");
    box.className = "scrolled";
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", "Table");
    table.replaceWith(box);
    box.append(table);
  }
  fragment.querySelectorAll("pre > code").forEach((code) => dress(code, finished));
  return fragment;
}

function asItIs(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(Object.assign(document.createElement("p"), { className: "as-it-is", textContent: text }));
  return fragment;
}

/** Images of other places are not loaded: whoever serves them would learn who reads this. */
function imageAsLink(image) {
  const link = document.createElement("a");
  link.textContent = image.alt || image.getAttribute("src") || "image";
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  if (image.getAttribute("src")) link.href = image.getAttribute("src");
  image.replaceWith(link);
}

function dress(code, finished) {
  const named = /language-([\w+#-]+)/.exec(code.className)?.[1]?.toLowerCase() ?? "";
  const language = ALIASES[named] ?? named;
  code.className = "";
  const figure = document.createElement("figure");
  const head = document.createElement("figcaption");
  const copy = document.createElement("button");
  copy.type = "button";
  copy.textContent = "Copy";
  copy.addEventListener("click", () => copyText(code.textContent, copy));
  head.append(Object.assign(document.createElement("span"), { textContent: named || "code" }), copy);
  const block = code.parentElement;
  block.tabIndex = 0; // so that the keyboard can scroll it
  block.setAttribute("role", "region");
  block.setAttribute("aria-label", `Code${named && `, ${named}`}`);
  block.replaceWith(figure);
  figure.append(head, block);
  if (finished && LANGUAGES.has(language)) highlight(code, language);
}

async function highlight(code, language) {
  if (!hljs.getLanguage(language)) {
    const module = await import(`../vendor/highlight/languages/${language}.js`);
    hljs.registerLanguage(language, module.default);
  }
  // The highlighter escapes what it marks; it is sanitised like everything else nevertheless.
  const spans = hljs.highlight(code.textContent, { language }).value;
  const rules = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };
  code.replaceChildren(DOMPurify.sanitize(spans, rules));
}

/** Copy a text, and say so on the button for a moment. */
export async function copyText(text, button) {
  const before = button.textContent;
  const done = await navigator.clipboard?.writeText(text).then(() => true, () => false);
  button.textContent = done ? "Copied" : "Not allowed";
  setTimeout(() => (button.textContent = before), 1500);
}
