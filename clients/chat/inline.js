// Makes elements from the marks inside a line of Markdown: code, emphasis, links.
//
// Text is never parsed as HTML, and nothing is loaded: an image becomes a link to it.

import { el } from "./dom.js";

const MAX_OPEN = 16; // Maximum number of nested marks. Further marks are text.
const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };
const MARK = /\\[!-/:-@[-`{-~]|`+|\*+|_+|~~|!?\[|\]|<?https?:\/\/[^\s<>]+>?| {2,8}\n|\n/g;
const TARGET = /\(\s{0,4}(?:<([^<>\n]*)>|([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*))(?:\s{1,4}"[^"\n]*")?\s{0,4}\)/y;
const WORD = /[\p{L}\p{N}]/u;

/** Appends the elements of `text` to `parent`. */
export function appendInline(parent, text) {
  const frames = [{ mark: "", nodes: [] }];
  const missing = new Set(); // Numbers of backticks for which no closing mark follows.
  let at = 0;
  MARK.lastIndex = 0;
  for (let found; (found = MARK.exec(text)); ) {
    const [mark] = found;
    frames.at(-1).nodes.push(text.slice(at, found.index));
    at = take(text, found.index, mark, frames, missing);
    MARK.lastIndex = at;
  }
  frames.at(-1).nodes.push(text.slice(at));
  unfold(frames, 1);
  parent.append(...frames[0].nodes);
}

/** Handles the mark at `start`; returns the index after the mark. */
function take(text, start, mark, frames, missing) {
  const end = start + mark.length;
  const { nodes } = frames.at(-1);
  switch (mark[0]) {
    case "\\":
      nodes.push(mark[1]);
      return end;
    case "`":
      return takeCode(text, end, mark, nodes, missing);
    case "[":
    case "!":
      open(frames, mark);
      return end;
    case "]":
      return closeLink(text, end, frames);
    case "<":
    case "h":
      return takeAddress(start, mark, nodes);
    case " ":
      nodes.push(el("br"));
      return end;
    case "\n":
      nodes.push(" ");
      return end;
    default:
      takeEmphasis(text, start, mark, frames);
      return end;
  }
}

function takeCode(text, start, ticks, nodes, missing) {
  if (!missing.has(ticks.length)) {
    const closing = new RegExp(`(?<!\`)${ticks}(?!\`)`, "g");
    closing.lastIndex = start;
    const found = closing.exec(text);
    if (found) {
      const code = text.slice(start, found.index).replace(/\n/g, " ");
      nodes.push(el("code", {}, /^ .*\S.* $/.test(code) ? code.slice(1, -1) : code));
      return found.index + ticks.length;
    }
    missing.add(ticks.length);
  }
  nodes.push(ticks);
  return start;
}

/** Opens a mark, or adds its characters as text if too many marks are open. */
function open(frames, mark) {
  if (frames.length > MAX_OPEN) frames.at(-1).nodes.push(mark);
  else frames.push({ mark, nodes: [] });
}

/** Turns open marks into text: adds the frames from index `from` on to the frame before them. */
function unfold(frames, from) {
  while (frames.length > from) {
    const { mark, nodes } = frames.pop();
    const before = frames.at(-1).nodes;
    before.push(mark);
    for (const node of nodes) before.push(node);
  }
}

function takeEmphasis(text, start, run, frames) {
  if (run.length > 3) {
    frames.at(-1).nodes.push(run);
    return;
  }
  const [before, after] = [text[start - 1] ?? " ", text[start + run.length] ?? " "];
  const inside = run[0] === "_" && WORD.test(before) && WORD.test(after);
  let left = run;
  while (left && !inside && /\S/.test(before)) {
    const number = frames.findLastIndex(({ mark }) => mark in TAGS && left.startsWith(mark));
    if (number < 1) break;
    const { mark } = frames[number];
    unfold(frames, number + 1);
    const { nodes } = frames.pop();
    frames.at(-1).nodes.push(el(TAGS[mark], {}, ...nodes));
    left = left.slice(mark.length);
  }
  while (left) {
    const mark = left.slice(0, left.length > 1 ? 2 : 1);
    if (!inside && /\S/.test(after) && mark in TAGS) open(frames, mark);
    else frames.at(-1).nodes.push(mark);
    left = left.slice(mark.length);
  }
}

function closeLink(text, end, frames) {
  const number = frames.findLastIndex(({ mark }) => mark === "[" || mark === "![");
  TARGET.lastIndex = end;
  const found = number > 0 ? TARGET.exec(text) : null;
  const address = found ? addressOf((found[1] ?? found[2]).replace(/\\(.)/g, "$1")) : null;
  if (number < 1) {
    frames.at(-1).nodes.push("]");
    return end;
  }
  if (!address) {
    unfold(frames, number);
    frames.at(-1).nodes.push("]");
    return end;
  }
  unfold(frames, number + 1);
  const { mark, nodes } = frames.pop();
  const shown = nodes.some((node) => node !== "") ? nodes : [address];
  frames.at(-1).nodes.push(link(address, mark === "![" ? ["Image: ", ...shown] : shown));
  return TARGET.lastIndex;
}

/** Makes a link of a bare address. Punctuation at its end is text. */
function takeAddress(start, mark, nodes) {
  const bare = mark.replace(/^</, "").replace(/>$/, "").replace(/[.,;:!?'")\]*_]{1,8}$/, "");
  const address = addressOf(bare);
  const from = mark.startsWith("<") && !mark.endsWith(">") ? 1 : 0;
  if (from) nodes.push("<");
  nodes.push(address ? link(address, [bare]) : bare);
  const closed = mark.startsWith("<") && mark.endsWith(">");
  return closed ? start + mark.length : start + from + bare.length;
}

/** The address of a link if its scheme is safe; otherwise null. */
export function addressOf(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

const link = (address, nodes) =>
  el("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, ...nodes);
