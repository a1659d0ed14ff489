// Shows the details of one step: the token, its mask, and the alternatives.

import { byId, el } from "./dom.js";
import { count, micros, percent, visible } from "./format.js";

/** Shows item `index` of a sequence. If `vocabulary` is null, ids replace the tokens' texts. */
export function showStep(sequence, index, vocabSize, vocabulary) {
  const item = sequence.items[index];
  const host = byId("step");
  host.hidden = !item;
  if (!item) return;
  const before = sequence.items[index - 1];
  host.replaceChildren(
    el("h3", { id: "step-title" }, `Step ${index + 1} of #${sequence.seq}`),
    el("p.token-text", {}, visible(item.text) || vocabulary?.label(item.id) || "no text yet"),
    facts(item, before, vocabSize),
    alternatives(item, vocabulary),
  );
}

function facts(item, before, vocabSize) {
  const list = el("dl.figures");
  const add = (name, value) => list.append(el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  if (item.appended) add("Probability", "appended, not sampled");
  else add("Probability", `${percent(Math.exp(item.logprob))} (${item.logprob.toFixed(2)})`);
  if (item.allowed !== null) {
    const share = percent(item.allowed / vocabSize);
    add("Allowed", `${count(item.allowed)} of ${count(vocabSize)} (${share})`);
  } else if (!item.appended) add("Allowed", "every token");
  if (item.cut.size) add("Cut off", `at least ${percent(item.cutOff)} of the probability`);
  if (item.roundUs) add("Round", micros(item.roundUs));
  add("Token", `id ${item.id}, position ${item.pos}`);
  if (item.taken) add("Splice", "taken back");
  return list;
}

function alternatives(item, vocabulary) {
  if (!item.likely.length) return el("p.hint", {}, "No alternatives: the token was not sampled.");
  const rows = item.likely.map(({ id, logprob }) => {
    const p = Math.exp(logprob);
    const cut = item.cut.has(id);
    const outcome = id === item.id ? "chosen" : cut ? "cut off" : "";
    const bias = item.bias.get(id);
    const sign = bias > 0 ? "+" : "\u2212";
    const added = bias === undefined ? "" : `bias ${sign}${Math.abs(bias).toPrecision(3)}`;
    const text = visible(vocabulary?.label(id) ?? (id === item.id ? item.text : `id ${id}`));
    const bar = el("span.bar", { "aria-hidden": "true" });
    bar.style.setProperty("--p", p.toFixed(4));
    return el(
      "tr",
      { "data-outcome": outcome },
      el("th", { scope: "row" }, cut ? el("s", {}, text) : text),
      el("td.outcome", {}, [outcome, added].filter(Boolean).join(", ")),
      el("td.share", {}, bar, percent(p)),
    );
  });
  return el(
    "table.alternatives",
    {},
    el("caption.unseen", {}, "The likely tokens at this step"),
    el(
      "thead.unseen",
      {},
      el(
        "tr",
        {},
        ...["Token", "Outcome", "Probability"].map((name) => {
          return el("th", { scope: "col" }, name);
        }),
      ),
    ),
    el("tbody", {}, ...rows),
  );
}
