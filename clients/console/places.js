// Finds the place of an error in an argument, from the message of a constraint's compiler.

/**
 * The place that `message` names in `text`: `{ start, end, line, column }`. Offsets count UTF-16
 * units; lines and columns count from 1. Null if the message does not name a place.
 */
export function placeOf(kind, message, text) {
  const at =
    pairOf(text, /\bline (\d+),? column (\d+)/.exec(message)) ??
    pairOf(text, kind === "lark" ? /\b(\d+)\((\d+)\):/.exec(message) : null) ??
    (kind === "python" || kind === "javascript" ? lineOf(text, message) : null) ??
    (kind === "regex" ? spanOf(text, message) : null) ??
    (kind === "json_schema" ? wordOf(text, message) : null);
  if (!at) return null;
  const before = text.slice(0, at.start).split("\n");
  return { ...at, line: before.length, column: [...before.at(-1)].length + 1 };
}

/** Parses "line 3, column 9". Columns count characters from 1. */
function pairOf(text, match) {
  if (!match) return null;
  const lines = text.split("\n");
  const line = Math.min(Number(match[1]), lines.length) - 1;
  let start = 0;
  for (let i = 0; i < line; i++) start += lines[i].length + 1;
  start += offsetOf(lines[line], Number(match[2]) - 1);
  return { start, end: wordEnd(text, start) };
}

/** Parses "line 3: ", and marks the whole line without its indentation. */
function lineOf(text, message) {
  const match = /\bline (\d+): /.exec(message);
  const lines = text.split("\n");
  if (!match || Number(match[1]) > lines.length) return null;
  const line = Number(match[1]) - 1;
  const start = lines.slice(0, line).reduce((at, each) => at + each.length + 1, 0);
  const indented = lines[line].length - lines[line].trimStart().length;
  return { start: start + indented, end: start + lines[line].length };
}

/** Parses "(pattern '…', at 3)" and "the part '…' at 3 to 19". Positions count characters from 0. */
function spanOf(text, message) {
  const part = /' at (\d+) to (\d+)\b/.exec(message);
  if (part) return { start: offsetOf(text, Number(part[1])), end: offsetOf(text, Number(part[2])) };
  const at = /, at (\d+)\)$/.exec(message.trim());
  if (!at) return null;
  const start = offsetOf(text, Number(at[1]));
  const construct = /'([^']+)' is not supported/.exec(message)?.[1] ?? "";
  const length = text.startsWith(construct, start) ? construct.length : 0;
  return { start, end: start + Math.max(length, 1) };
}

/** The place of a key or value that the message names, if the schema has it exactly once. */
function wordOf(text, message) {
  for (const [, quoted, bare] of message.matchAll(/"([^"]+)"|: (\w+)$/g)) {
    const word = JSON.stringify(quoted ?? bare);
    const start = text.indexOf(word);
    if (start >= 0 && text.indexOf(word, start + 1) < 0) return { start, end: start + word.length };
  }
  return null;
}

function offsetOf(text, characters) {
  return [...text].slice(0, Math.max(0, characters)).join("").length;
}

function wordEnd(text, start) {
  const word = /^(\w+|'(\\.|[^'\\\n])*'|"(\\.|[^"\\\n])*")/.exec(text.slice(start));
  return start + Math.max(1, word?.[0].length ?? 1);
}
