// Shows the processes and the live streams of the system, from STATUS.

import { byId, el, follow, setText } from "./dom.js";
import { age, bytes, count, counted } from "./format.js";

const ROLES = { gpu: "GPU worker", controller: "controller worker", state: "state worker" };
const ORDER = ["gpu", "controller", "state"];

/** Shows a `Status`. */
export function showSystem(status) {
  const workers = status.workers.toSorted(
    (a, b) => ORDER.indexOf(a.role) - ORDER.indexOf(b.role) || a.name.localeCompare(b.name),
  );
  const nodes = [brokerNode(status), ...workers.map(workerNode)];
  follow(byId("rail"), nodes, (node) => node.key, makeNode, updateNode);
  setText(byId("processes-summary"), summaryOf(nodes));
  showStreams(status.live ?? []);
}

/** The summary line of the processes, which a phone shows until the list is unfolded. */
function summaryOf(nodes) {
  const others = nodes.filter((node) => node.late || node.state !== "ready");
  const all = `${count(nodes.length)} processes`;
  if (!others.length) return `${all}, all ready`;
  return `${all}; ${others.map((node) => `${node.name} ${node.late || node.state}`).join(", ")}`;
}

const narrow = matchMedia("(max-width: 40rem)");
const unfold = () => (byId("processes").open = !narrow.matches);
narrow.addEventListener("change", unfold);
unfold();

/** Shows that the state of the system is unknown. */
export function showNoSystem() {
  const nodes = byId("rail").children;
  for (const node of nodes) {
    node.dataset.state = "unknown";
    setText(node.querySelector(".state"), "unknown");
  }
  if (!nodes.length) return;
  setText(byId("processes-summary"), `${count(nodes.length)} processes, all unknown`);
  byId("streams").hidden = true;
  setText(byId("streams-count"), "unknown");
}

function brokerNode(status) {
  return {
    key: "broker",
    role: `up ${age(status.uptime_s)}`,
    name: "broker",
    state: "ready",
    busy: status.streams > 0,
    share: null,
    facts: [
      counted(status.sessions, "session"),
      counted(status.streams, "stream") + (status.queued ? `, ${count(status.queued)} queued` : ""),
    ],
  };
}

function workerNode(worker) {
  const load = worker.load ?? {};
  return {
    key: worker.name,
    role: ROLES[worker.role] ?? worker.role,
    name: worker.name,
    state: worker.state,
    busy: worker.requests > 0,
    share: worker.role === "state" ? null : worker.requests / Math.max(1, worker.capacity),
    load: `${count(worker.requests)} of ${count(worker.capacity)} requests`,
    facts: (FACTS[worker.role] ?? (() => []))(worker, load),
    models: worker.models,
    late: worker.heartbeat_age_s > 5 ? `silent for ${age(worker.heartbeat_age_s)}` : "",
  };
}

const FACTS = {
  gpu: (worker, load) => [
    worker.models.join(", ") || "no model loaded",
    `${count(Math.round(load.tokens_per_s ?? 0))} tokens/s`,
    `KV cache ${Math.round((100 * (load.kv_blocks_used ?? 0)) / Math.max(1, load.kv_blocks ?? 0))} %`,
    load.suspended ? `${count(load.suspended)} suspended` : "",
    load.loading ? `${count(load.loading)} waiting for a model` : "",
    ...Object.values(worker.paths ?? {}).flatMap(pathFacts),
  ],
  controller: (_, load) => [
    counted(load.sessions ?? 0, "controller"),
    `${count(load.rounds ?? 0)} rounds`,
    load.waiting ? `${count(load.waiting)} waiting` : "",
  ],
  state: (_, load) => [
    `${counted(load.variables ?? 0, "variable")}, ${bytes(load.bytes ?? 0)}`,
    `${count(load.ops ?? 0)} operations`,
  ],
};

/** The attention backend and the graphs of a model, and the reasons why fast paths are missing. */
function pathFacts({ attention, graphs, fallbacks = [] }) {
  const how = attention ? `attention: ${attention}` : "";
  const shown = graphs ? `${how}, ${count(graphs)} CUDA graphs` : how;
  return [shown, ...fallbacks.map((why) => `slower than possible: ${why}`)];
}

function makeNode(node) {
  return el(
    "li.node",
    {},
    el("p.role"),
    el("p.name", {}, el("b"), el("span.state")),
    el(
      "p.load",
      {},
      el("meter", { min: 0, max: 1, "aria-label": `load of ${node.name}` }),
      el("span"),
    ),
    el("ul.facts", { role: "list" }),
  );
}

function updateNode(element, node) {
  element.dataset.state = node.late ? "late" : node.state;
  element.dataset.busy = node.busy;
  element.dataset.role = node.key === "broker" ? "broker" : "worker";
  setText(element.querySelector(".role"), node.role);
  setText(element.querySelector(".name b"), node.name);
  setText(element.querySelector(".state"), node.late || node.state);
  const load = element.querySelector(".load");
  load.hidden = node.share === null;
  if (node.share !== null) {
    load.firstChild.value = node.share;
    setText(load.lastChild, node.load);
  }
  const facts = node.facts.filter(Boolean).map((text, i) => ({ text, i }));
  follow(
    element.querySelector(".facts"),
    facts,
    (f) => f.i,
    () => el("li"),
    (li, f) => {
      setText(li, f.text);
    },
  );
}

const COLUMNS = [
  // The lower 32 bits of a request id are a counter. The upper 32 bits identify the broker process.
  ["Request", (s) => String(BigInt(s.request) & 0xffffffffn)],
  ["State", (s) => s.state],
  ["Program", (s) => s.client || "unnamed"],
  ["Model", (s) => s.model || "default"],
  ["Worker", (s) => s.worker || "none yet"],
  ["Controller", (s) => s.controller || "none"],
  ["Priority", (s) => String(s.priority ?? 0)],
  ["Age", (s) => age(s.age_s)],
];

function showStreams(streams) {
  const body = byId("streams").tBodies[0];
  byId("streams").hidden = streams.length === 0;
  setText(
    byId("streams-count"),
    streams.length ? counted(streams.length, "stream") : "No stream is running.",
  );
  follow(
    body,
    streams,
    (s) => s.request,
    () =>
      el(
        "tr",
        { role: "row" },
        ...COLUMNS.map(([name]) => {
          return el("td", { role: "cell", "data-name": name });
        }),
      ),
    (row, stream) => {
      row.dataset.state = stream.state;
      COLUMNS.forEach(([, text], i) => setText(row.cells[i], text(stream)));
      row.cells[0].title = `${stream.type} ${stream.request}`;
      row.cells[5].title = stream.controller_worker ?? "";
    },
  );
}
