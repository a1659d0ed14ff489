// Shows one message of a conversation, and its buttons.
//
// Events bubble from the element of a message: `chat-edit`, `chat-retry`, `chat-branch`,
// `chat-version`, `chat-results`, `chat-draft`, `chat-settings`. Their `detail` has the message.

import { versionsOf } from "./conversation.js";
import { el, setText } from "./dom.js";
import { showMarkdown } from "./markdown.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Results of calls" };

/** Creates the element of a message. */
export function messageElement(message) {
  const item = el(`li.message.${message.role}`);
  item.append(
    el("h3.unseen", {}, NAMES[message.role]),
    el("div.content"),
    el("div.tail", { role: "group", "aria-label": "Actions" }),
  );
  return item;
}

/** Updates the element of a message. */
export function updateMessage(item, message, conversation, isLast) {
  const content = item.querySelector(".content");
  if (message.role === "user") showUser(content, message);
  else if (message.role === "tool") showResults(content, message);
  else showAnswer(content, message, isLast);
  showTail(item.querySelector(".tail"), message, conversation);
}

/** Dispatches an event about a message at `element`. */
function report(element, name, message, detail = {}) {
  const init = { bubbles: true, detail: { message, ...detail } };
  element.dispatchEvent(new CustomEvent(`chat-${name}`, init));
}

function showUser(content, message) {
  const editing = message.draft != null;
  if (content.firstChild && editing === Boolean(content.querySelector("textarea"))) return;
  content.replaceChildren(editing ? editor(content, message) : el("p.said", {}, message.text));
  content.querySelector("textarea")?.focus();
}

function editor(content, message) {
  const field = el("textarea", { rows: 3, "aria-label": "Your message" });
  field.value = message.draft;
  field.addEventListener("input", () => {
    message.draft = field.value;
    report(content, "draft", message);
  });
  const cancel = () => {
    message.draft = null;
    report(content, "draft", message, { ended: true });
  };
  const send = () => field.value.trim() && report(content, "edit", message, { text: field.value });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    else if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    else send();
    event.preventDefault();
    event.stopPropagation();
  });
  const buttons = [
    el("button.primary", { type: "button", onclick: send }, "Send"),
    el("button", { type: "button", onclick: cancel }, "Cancel"),
  ];
  return el("div.editor-of-message", {}, field, el("div.row", {}, ...buttons));
}

function showResults(content, message) {
  if (content.firstChild) return;
  content.append(
    ...message.results.map(({ name, text }) =>
      el("details.fold", {}, el("summary", {}, `Result of ${name}`), el("pre", {}, text)),
    ),
  );
}

function showAnswer(content, message, isLast) {
  if (!content.firstChild) {
    const summary = el("summary");
    content.append(
      el("details.fold.thinking", { hidden: true }, summary, el("div.thought")),
      el("div.markdown"),
      el("div.calls"),
      el("p.hint.state", { hidden: true }),
      el("div.fault", { role: "alert", hidden: true }),
    );
  }
  const [thinking, text, calls, state, fault] = content.children;
  thinking.hidden = !message.thinking;
  const thinks = message.state === "running" && !message.text && !message.calls.length;
  setText(thinking.firstChild, thinks ? "Thinking …" : "Thinking");
  setText(thinking.lastChild, message.thinking);
  showMarkdown(text, message.text);
  showCalls(calls, message, isLast);
  showState(state, message);
  showFault(fault, message);
}

function showState(state, message) {
  const cut = message.state === "done" && message.reason === "length";
  const nothing = message.state === "done" && !message.text && !message.calls.length;
  const waits = message.state === "running" && !message.text && !message.calls.length;
  const what =
    message.notice ||
    (cut ? "The answer reached the maximum number of tokens." : "") ||
    (nothing ? "The model ended its answer without text." : "") ||
    (message.state === "stopped" ? "Stopped." : "") ||
    (waits ? "Waiting for the model …" : "");
  state.hidden = !what;
  setText(state, what);
}

function showFault(fault, message) {
  fault.hidden = !message.error;
  if (!message.error) return;
  const { message: words } = message.error;
  if (fault.dataset.words === words) return;
  fault.dataset.words = words;
  const again = el("button", { type: "button" }, "Try again");
  again.addEventListener("click", () => report(fault, "retry", message));
  const settings = el("button", { type: "button" }, "Settings");
  settings.addEventListener("click", () => report(fault, "settings", message));
  fault.replaceChildren(el("p", {}, words), el("div.row", {}, again, settings));
}

function showCalls(place, message, isLast) {
  message.calls.forEach((call, number) => {
    const shown =
      place.querySelector(`[data-call="${number}"]`) ?? place.appendChild(callElement(call, number));
    setText(shown.querySelector("pre"), inLines(call.arguments));
  });
  const wanted = isLast && message.state === "done" && message.calls.length > 0;
  const form = place.querySelector("form");
  if (wanted && !form) place.append(resultsForm(place, message));
  else if (!wanted) form?.remove();
}

function callElement(call, number) {
  const summary = el("summary", {}, "Calls ", el("code", {}, call.name));
  const text = el("pre", { "aria-label": `Arguments of ${call.name}`, role: "group" });
  return el("details.fold", { "data-call": number, open: true }, summary, text);
}

/** The arguments of a call, indented if they are valid JSON. */
function inLines(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function resultsForm(place, message) {
  message.drafts ??= {};
  const fields = message.calls.map((call) => {
    const field = el("textarea", { rows: 2, class: "code", spellcheck: "false" });
    field.value = message.drafts[call.id] ?? "";
    field.addEventListener("input", () => {
      message.drafts[call.id] = field.value;
      report(place, "draft", message);
    });
    return field;
  });
  const labels = message.calls.map(({ name }, i) => el("label", {}, `Result of ${name}`, fields[i]));
  const form = el("form", {}, ...labels, el("button.primary", { type: "submit" }, "Send results"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const results = message.calls.map(({ id, name }, i) => ({ id, name, text: fields[i].value }));
    report(place, "results", message, { results });
  });
  return form;
}

function showTail(tail, message, conversation) {
  const versions = versionsOf(conversation, message);
  const place = versions.indexOf(message) + 1;
  const now = [message.state, message.draft != null, place, versions.length].join();
  if (tail.dataset.now === now) return;
  tail.dataset.now = now;
  tail.replaceChildren(
    ...(versions.length > 1 ? [versionButtons(tail, message, versions, place)] : []),
    ...(message.role === "user" && message.draft == null ? [editButton(tail, message)] : []),
    ...(message.role === "assistant" ? answerButtons(tail, message, conversation) : []),
  );
}

function versionButtons(tail, message, versions, place) {
  const step = (by, name, sign) => {
    const to = versions[place - 1 + by];
    const button = el("button.quiet", { type: "button", "aria-label": name, disabled: !to }, sign);
    button.addEventListener("click", () => report(tail, "version", message, { to }));
    return button;
  };
  const count = el("span", {}, `${place} of ${versions.length}`);
  return el("span.versions", {}, step(-1, "Earlier version", "‹"), count, step(1, "Later version", "›"));
}

function editButton(tail, message) {
  const edit = el("button.quiet", { type: "button" }, "Edit");
  edit.addEventListener("click", () => {
    message.draft = message.text;
    report(tail, "draft", message, { ended: true });
  });
  return edit;
}

function answerButtons(tail, message, conversation) {
  if (message.state === "running") return [];
  const button = (words, act) => el("button.quiet", { type: "button", onclick: act }, words);
  const copy = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(message.text);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Not allowed";
    }
  });
  // With the relation `opener`, the new tab gets a copy of this tab's session storage, which
  // contains the API key.
  const why = { href: `console#why=${conversation.id}.${message.id}`, target: "_blank", rel: "opener" };
  return [
    copy,
    button("Again", () => report(tail, "retry", message)),
    button("Branch", () => report(tail, "branch", message)),
    el("a.quiet", why, "Why this token"),
  ];
}
