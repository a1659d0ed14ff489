// Shows Markdown: paragraphs, headings, lists, quotes, tables and code.
//
// Elements are made one by one and text is added as text, so the output of a model never becomes
// HTML.

import { el } from "./dom.js";
import { appendInline } from "./inline.js";

const MAX_DEPTH = 8; // Maximum depth of lists and quotes; deeper ones become paragraphs.
const MAX_RULE = 1000; // Maximum length of the line below the head of a table.
const MAX_COLUMNS = 64; // Maximum number of columns, because many cells make a browser slow.
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})[ \t]*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t](.*)|)$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}>[ \t]?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:([ \t]+)(.*)|[ \t]*)$/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const BLANK = /^[ \t]*$/;

/** Shows `text` in `parent`. Keeps the elements of the first blocks, up to the first changed block. */
export function showMarkdown(parent, text) {
  const blocks = blocksOf(text.replace(/\r\n?/g, "\n").split("\n"));
  const sources = blocks.map(({ kind, lines, info }) => `${kind} ${info} ${lines.join("\n")}`);
  const known = parent.sources ?? [];
  let same = 0;
  while (same < sources.length && sources[same] === known[same]) same += 1;
  while (parent.childNodes.length > same) parent.lastChild.remove();
  parent.append(...blocks.slice(same).map((block) => elementOf(block, 0)));
  parent.sources = sources;
}

/** The blocks of some lines: `{ kind, lines, info }`. */
function blocksOf(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (BLANK.test(lines[at])) at += 1;
    else {
      const block = blockAt(lines, at);
      blocks.push(block);
      at = block.end;
    }
  }
  return blocks;
}

function blockAt(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return block("heading", [titleOf(heading[2] ?? "")], at + 1, heading[1].length);
  if (RULE.test(line)) return block("rule", [], at + 1);
  if (QUOTE.test(line)) return quoted(lines, at);
  if (ITEM.test(line)) return listed(lines, at);
  if (isTable(line, lines[at + 1])) return tabled(lines, at);
  return paragraph(lines, at);
}

const block = (kind, lines, end, info = "") => ({ kind, lines, end, info });

/** Whether a table begins: `head` and `rule` have equally many cells, at most `MAX_COLUMNS`. */
function isTable(head, rule = "") {
  if (!head.includes("|") || rule.length > MAX_RULE || !TABLE_RULE.test(rule)) return false;
  const columns = cellsOf(rule).length;
  return columns <= MAX_COLUMNS && cellsOf(head).length === columns;
}

/** The text of a heading without the marks at its end. */
const titleOf = (text) => text.trim().replace(/(?:^|[ \t])#+$/, "");

/** A code block. Its closing line may not have arrived yet. */
function fenced(lines, at, [, fence, language]) {
  const closing = new RegExp(`^ {0,3}\\${fence[0]}{${fence.length},}[ \\t]*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  return block("code", lines.slice(at + 1, end), Math.min(end + 1, lines.length), language);
}

function quoted(lines, at) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  return block("quote", lines.slice(at, end).map((line) => line.replace(QUOTE, "")), end);
}

/**
 * A list: its items, blank lines between them, lines that are indented below an item, and lines that
 * continue an item's paragraph.
 */
function listed(lines, at) {
  const ordered = /\d/.test(ITEM.exec(lines[at])[2]);
  let end = at;
  for (let next = at; next < lines.length; next++) {
    const line = lines[next];
    if (BLANK.test(line)) continue;
    const item = ITEM.exec(line);
    const own = item !== null && !RULE.test(line) && /\d/.test(item[2]) === ordered;
    const lazy = next === end && item === null && !startsBlock(line);
    if (!own && !/^(?: {2,}|\t)/.test(line) && !lazy) break;
    end = next + 1;
  }
  return block(ordered ? "ordered" : "bullets", lines.slice(at, end), end);
}

function tabled(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && !BLANK.test(lines[end])) end += 1;
  return block("table", lines.slice(at, end), end);
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && !BLANK.test(lines[end]) && !startsBlock(lines[end])) end += 1;
  return block("paragraph", lines.slice(at, end), end);
}

const startsBlock = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((form) => form.test(line));

function elementOf({ kind, lines, info }, depth) {
  if (kind === "code") return codeBlock(lines.join("\n"), info);
  if (kind === "rule") return el("hr");
  if (kind === "heading") return inline(`h${Math.min(6, info + 2)}`, lines[0]);
  if (kind === "paragraph" || depth >= MAX_DEPTH) {
    return inline("p", lines.map((line) => line.trimStart()).join("\n"));
  }
  if (kind === "quote") return el("blockquote", {}, ...elementsOf(lines, depth + 1));
  if (kind === "table") return table(lines);
  return list(kind, lines, depth);
}

const elementsOf = (lines, depth) => blocksOf(lines).map((one) => elementOf(one, depth));

function inline(tag, text) {
  const element = el(tag);
  appendInline(element, text.trimEnd());
  return element;
}

function list(kind, lines, depth) {
  const items = [];
  let indent = 0;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && (!items.length || item[1].length < indent)) {
      indent = item[1].length + item[2].length + Math.min(4, item[3]?.length ?? 1);
      items.push([item[4] ?? ""]);
    } else items.at(-1).push(line.replace(new RegExp(`^(?: {1,${indent}}|\\t)`), ""));
  }
  const first = Number.parseInt(ITEM.exec(lines[0])[2], 10);
  const loose = lines.some((line) => BLANK.test(line));
  const attributes = kind === "ordered" && first !== 1 ? { start: first } : {};
  const made = items.map((own) => el("li", {}, ...contentOf(elementsOf(own, depth + 1), loose)));
  return el(kind === "ordered" ? "ol" : "ul", attributes, ...made);
}

/** The content of a list item. In a list without blank lines, the first paragraph gets no `p` element. */
function contentOf(elements, loose) {
  const [first, ...others] = elements;
  if (loose || first?.tagName !== "P") return elements;
  return [...first.childNodes, ...others];
}

function table(lines) {
  const [head, rule, ...rows] = lines.map(cellsOf);
  const ends = rule.map((cell) => (/-:$/.test(cell) ? (cell[0] === ":" ? "center" : "end") : null));
  const row = (cells, tag) =>
    el("tr", {}, ...cells.slice(0, head.length).map((text, i) => {
      const cell = inline(tag, text);
      if (ends[i]) cell.className = ends[i];
      return cell;
    }));
  return el(
    "div.wide",
    { tabindex: 0, role: "group", "aria-label": "Table" },
    el("table", {}, el("thead", {}, row(head, "th")), el("tbody", {}, ...rows.map((r) => row(r, "td")))),
  );
}

function cellsOf(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replace(/\\\|/g, "|"));
}

function codeBlock(text, language) {
  const copy = el("button.copy", { type: "button" }, "Copy");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Not allowed";
    }
  });
  return el(
    "figure.block",
    {},
    el("figcaption", {}, el("span", {}, language || "text"), copy),
    el("pre", { tabindex: 0, role: "group", "aria-label": "Code" }, el("code", {}, text)),
  );
}
