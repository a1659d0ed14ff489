// Adds the chunks of a stream to an answer.

/** The fields of a new answer with these settings. */
export function newAnswer(settings) {
  return {
    role: "assistant",
    text: "",
    thinking: "",
    calls: [],
    state: "running", // Later "done", "stopped" or "failed".
    reason: null,
    error: null,
    event: 0,
    settings,
  };
}

/** Adds a chunk of `/v1/chat/completions` to an answer. */
export function addChunk(answer, chunk) {
  const [choice] = chunk.choices;
  if (!choice) return;
  const { delta, finish_reason: reason, tokenbus: receipt } = choice;
  if (receipt?.backtrack) answer.text = withoutEnd(answer.text, receipt.backtrack);
  answer.thinking += delta.reasoning_content ?? "";
  answer.text += delta.content ?? "";
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    answer.calls[index] ??= { id, name: called.name, arguments: "" };
    answer.calls[index].arguments += called.arguments;
  }
  if (reason) answer.reason = reason;
  if (receipt?.error) answer.error = { message: receipt.error, param: null };
}

/** `text` without its last characters. A character may have two UTF-16 units. */
function withoutEnd(text, characters) {
  return [...text].slice(0, -characters).join("");
}
