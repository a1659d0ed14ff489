// Stores conversations as trees of messages, and makes the requests for their answers.
//
// Each message has the id of its parent. Messages with the same parent are versions of one another.
// `shown` maps the id of a parent to the id of the version that the page shows.

const ROOT = "";
const TITLE_CHARACTERS = 60;

/** A new id. It is random, because ids are also idempotency keys, which nobody may guess. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** An empty conversation with these settings. */
export function newConversation(settings) {
  return { id: newId(), title: "", updated: Date.now(), draft: "", settings, messages: [], shown: {} };
}

/** A message of a conversation by its id. */
export function messageOf(conversation, id) {
  return conversation.messages.find((message) => message.id === id);
}

/** Adds a message below `parent` (null: at the beginning), and shows it. */
export function addMessage(conversation, parent, fields) {
  const message = { id: newId(), parent: parent?.id ?? ROOT, ...fields };
  conversation.messages.push(message);
  conversation.shown[message.parent] = message.id;
  conversation.updated = Date.now();
  if (!conversation.title && message.role === "user") conversation.title = titleOf(message.text);
  return message;
}

function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > TITLE_CHARACTERS ? `${line.slice(0, TITLE_CHARACTERS - 1)}…` : line;
}

/** The messages that the page shows, from the first to the last. */
export function pathOf(conversation) {
  const children = Map.groupBy(conversation.messages, (message) => message.parent);
  const path = [];
  let id = ROOT;
  while (children.has(id)) {
    const versions = children.get(id);
    const next = versions.find((one) => one.id === conversation.shown[id]) ?? versions.at(-1);
    path.push(next);
    id = next.id;
  }
  return path;
}

/** The messages before `message`, from the first. */
export function before(conversation, message) {
  const known = new Map(conversation.messages.map((one) => [one.id, one]));
  const path = [];
  for (let at = known.get(message.parent); at; at = known.get(at.parent)) path.unshift(at);
  return path;
}

/** The versions of a message, in the order of their creation. */
export function versionsOf(conversation, message) {
  return conversation.messages.filter((one) => one.parent === message.parent);
}

/** A new conversation with the messages up to `last`. */
export function branchAt(conversation, last) {
  const branch = newConversation(structuredClone(conversation.settings));
  branch.title = conversation.title;
  branch.messages = structuredClone([...before(conversation, last), last]);
  return branch;
}

/** A copy of a conversation's settings for one answer, with a new seed. */
export function settingsOfAnswer(settings) {
  const [seed] = crypto.getRandomValues(new Uint32Array(1));
  return { ...structuredClone(settings), seed };
}

/**
 * The body of the request for `answer`. The same answer always has the same body, because the
 * messages before it and its settings do not change.
 */
export function requestOf(conversation, answer) {
  const { model, system, temperature, max_tokens, tools, seed } = answer.settings;
  const messages = before(conversation, answer).flatMap(inRequest);
  const body = { model, messages: withResults(messages), seed, stream: true };
  if (system) body.messages.unshift({ role: "system", content: system });
  if (temperature != null) body.temperature = temperature;
  if (max_tokens != null) body.max_tokens = max_tokens;
  if (tools?.trim()) body.tools = toolsIn(tools);
  return body;
}

function inRequest(message) {
  if (message.role === "user") return [{ role: "user", content: message.text }];
  if (message.role === "tool") {
    return message.results.map(({ id, text }) => ({ role: "tool", tool_call_id: id, content: text }));
  }
  const { text, thinking, calls } = message;
  if (!text && !calls.length) return []; // The answer failed or was stopped before any text arrived.
  const given = { role: "assistant", content: text || null };
  if (thinking) given.reasoning_content = thinking;
  if (calls.length) {
    given.tool_calls = calls.map(({ id, name, arguments: text }) => {
      return { id, type: "function", function: { name, arguments: text } };
    });
  }
  return [given];
}

/** Adds a result for each call that has no result, because templates require results. */
function withResults(messages) {
  const answered = new Set(messages.map((message) => message.tool_call_id));
  return messages.flatMap((message) => {
    const open = (message.tool_calls ?? []).filter(({ id }) => !answered.has(id));
    const results = open.map(({ id }) => {
      return { role: "tool", tool_call_id: id, content: "The user did not run this call." };
    });
    return [message, ...results];
  });
}

/**
 * Reads the tools from `text`, a JSON list of functions or of tools in OpenAI's form. Throws an
 * Error whose message is written for the user.
 */
export function toolsIn(text) {
  let given;
  try {
    given = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are not valid JSON: ${error.message}`);
  }
  if (!Array.isArray(given)) throw new Error("The tools are not a list; write [ … ] around them.");
  return given.map((tool, number) => {
    const named = tool?.function ?? tool;
    if (typeof named?.name !== "string") {
      throw new Error(`Tool ${number + 1} has no name; give {"name": …, "parameters": …}.`);
    }
    return { type: "function", function: named };
  });
}
