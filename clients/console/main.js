// Connects the form and the views of the console.

import { Composer } from "./composer.js";
import { Connection } from "./connection.js";
import { byId, setText } from "./dom.js";
import { GenerationView } from "./generation-view.js";
import { showNoSystem, showSystem } from "./system.js";
import { requestedAnswer } from "./why.js";

const POLL_MS = 1000;
const KEY = "tokenbus-key";
const LINK = {
  connecting: "connecting",
  waiting: "waiting for the broker",
  open: "connected",
  lost: "disconnected, reconnecting",
  refused: "refused, trying again",
};

const address = new URL("./", location.href);
address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
const connection = new Connection(address.href, sessionStorage.getItem(KEY) ?? "");
const composer = new Composer(connection);
const view = new GenerationView(connection);

composer.addEventListener("generate", ({ detail }) => view.start(detail));
composer.addEventListener("stop", () => view.stop());
view.addEventListener("running", ({ detail }) => (composer.running = detail));
view.addEventListener("fault", ({ detail }) => composer.showFault(detail));

connection.addEventListener("state", ({ detail: state }) => {
  const link = byId("link");
  link.dataset.state = state;
  setText(link, LINK[state]);
  if (state === "open") {
    byId("key-dialog").close();
    composer.refreshModules().catch(() => {});
    poll();
    explain();
  } else showNoSystem();
  if (state === "refused") askForKey();
});

let explained = false;

/**
 * If this page's address names an answer of the chat page, generates that answer again. Only the
 * first call has an effect.
 */
async function explain() {
  if (explained) return;
  explained = true;
  try {
    const answer = await requestedAnswer();
    if (answer) composer.replay(answer);
  } catch (fault) {
    composer.showFault({ message: fault.message });
  }
}

let polling = false;
let nextPoll = 0;

/** Shows the status. Requests it again one second after each answer while the page is visible. */
async function poll() {
  clearTimeout(nextPoll);
  if (polling || document.hidden || !connection.open) return;
  polling = true;
  try {
    const { status } = await connection.request("STATUS", { streams: true });
    showSystem(status);
    composer.suggest("models", [...new Set(status.workers.flatMap((w) => w.models))]);
    composer.served = [...new Set(status.workers.flatMap((w) => w.controllers ?? []))];
  } catch {
    // The state of the connection shows the error.
  }
  polling = false;
  nextPoll = setTimeout(poll, POLL_MS);
}

document.addEventListener("visibilitychange", poll);
addEventListener("pagehide", () => connection.leave());

function askForKey() {
  const dialog = byId("key-dialog");
  if (!dialog.open) dialog.showModal();
}

byId("key-dialog").addEventListener("submit", () => {
  const key = byId("key").value.trim();
  sessionStorage.setItem(KEY, key);
  connection.useKey(key);
});

const theme = byId("theme");
theme.value = localStorage.getItem("tokenbus-theme") ?? "";
function applyTheme() {
  document.documentElement.dataset.theme = theme.value;
  localStorage.setItem("tokenbus-theme", theme.value);
  view.redraw();
}
theme.addEventListener("change", applyTheme);
applyTheme();

connection.connect();
