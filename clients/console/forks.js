// Draws the tree of forks, with a line for each sequence from its fork to its end.

import { el, svg } from "./dom.js";
import { counted } from "./format.js";
import { writeText } from "./notes.js";

const LANE = 26; // Pixels between two sequences.
const LEFT = 10;
const RIGHT = 40; // Pixels for the number of a sequence.

/**
 * Draws the tree into `host`, `width` pixels wide. Hides `host` unless the generation has several
 * sequences, a splice, or a write to a variable.
 */
export function drawForks(host, width, generation, chosen, select) {
  const sequences = generation.inOrder;
  const worth = sequences.length > 1 || sequences.some((s) => s.splices.length || s.writes.length);
  host.hidden = !worth;
  if (!worth) return;
  const longest = Math.max(12, ...sequences.map(reach));
  const x = (pos) => LEFT + ((width - LEFT - RIGHT) * pos) / longest;
  const y = new Map(sequences.map((s, i) => [s, 18 + i * LANE]));
  const height = 18 + (sequences.length - 1) * LANE + 18;
  const drawing = svg("svg", {
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": summary(sequences),
  });
  for (const sequence of sequences.toReversed()) {
    const lane = svg("g", {
      class: sequence === chosen ? "lane chosen" : "lane",
      "data-seq": sequence.seq,
      "data-state": sequence.error ? "error" : sequence.finish ? "ended" : "running",
    });
    const at = y.get(sequence);
    lane.append(svg("path", { class: "line", d: line(sequence, x, y) }));
    for (const { from, to } of sequence.splices) {
      lane.append(svg("path", { class: "splice", d: arc(x(from), x(to), at) }));
    }
    for (const write of sequence.writes) {
      const mark = `M${x(write.pos)} ${at - 5}l5 5l-5 5l-5 -5z`;
      const title = svg("title", {}, writeText(write));
      lane.append(svg("path", { class: "write", d: mark }, title));
    }
    lane.append(
      svg("circle", { class: "end", cx: x(sequence.length), cy: at, r: 3.5 }),
      svg(
        "text",
        { x: Math.min(x(reach(sequence)) + 10, width - RIGHT + 10), y: at + 4 },
        `#${sequence.seq}${sequence.chosenBy ? " ✓" : ""}`,
      ),
      svg("rect", { class: "hit", x: 0, y: at - LANE / 2, width, height: LANE }),
    );
    lane.addEventListener("click", () => select(sequence));
    drawing.append(lane);
  }
  host.replaceChildren(drawing, legend(sequences));
}

/** The largest position that a sequence has reached. */
function reach(sequence) {
  return Math.max(sequence.length, ...sequence.splices.map((s) => s.from), 0);
}

function line(sequence, x, y) {
  const at = y.get(sequence);
  const end = `H${Math.max(x(reach(sequence)), x(sequence.from) + 1)}`;
  if (!sequence.parent) return `M${x(0)} ${at}${end}`;
  const begin = x(sequence.from);
  const above = y.get(sequence.parent);
  return `M${begin} ${above}V${at - 8}Q${begin} ${at} ${begin + 8} ${at}${end}`;
}

function arc(from, to, at) {
  const height = Math.min(11, 4 + (from - to) / 6);
  return `M${from} ${at - 2}C${from} ${at - height - 4} ${to} ${at - height - 4} ${to} ${at - 2}`;
}

function legend(sequences) {
  const signs = [];
  if (sequences.some((s) => s.writes.length))
    signs.push(el("span", {}, el("i.diamond"), "wrote a variable"));
  if (sequences.some((s) => s.chosenBy)) signs.push(el("span", {}, "✓ chosen by its controller"));
  if (sequences.some((s) => s.splices.length)) signs.push(el("span", {}, el("i.arc"), "took back"));
  return el("p.legend", { "aria-hidden": "true" }, ...signs);
}

function summary(sequences) {
  const each = sequences.map((s) => {
    const origin = s.parent ? ` forked from #${s.parent.seq} at token ${s.from}` : "";
    const notes = [counted(s.own, "token")];
    if (s.chosenBy) notes.push(`chosen by #${s.chosenBy.seq}`);
    if (s.writes.length) notes.push(counted(s.writes.length, "write") + " to variables");
    if (s.splices.length) notes.push(counted(s.splices.length, "splice"));
    return `#${s.seq}${origin}: ${notes.join(", ")}`;
  });
  return `Tree of ${counted(sequences.length, "sequence")}. ${each.join("; ")}.`;
}
