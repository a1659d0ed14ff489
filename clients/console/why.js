// Reads the request of an answer of the chat page. The console then generates this answer again.

import { send } from "../chat/completion.js";
import { messageOf, requestOf } from "../chat/conversation.js";
import { Store } from "../chat/store.js";

const FORM = /^#why=(\w+)\.(\w+)$/;

/**
 * The prompt's text and the `GENERATE` of the answer that the page's address names; null if the
 * address does not name an answer. Throws an Error whose message is written for the user.
 */
export async function requestedAnswer() {
  const named = FORM.exec(location.hash);
  if (!named) return null;
  const conversation = await new Store().get(named[1]);
  const answer = conversation && messageOf(conversation, named[2]);
  if (!answer) throw new Error("this browser does not have the answer any more");
  const body = JSON.stringify(requestOf(conversation, answer));
  const headers = { "content-type": "application/json" };
  return (await send("console/request", { method: "POST", body, headers })).json();
}
