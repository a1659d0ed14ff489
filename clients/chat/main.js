// Connects the parts of the chat page.

import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { byId, setText } from "./dom.js";
import { defaults, Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Store } from "./store.js";
import { Thread } from "./thread.js";

const THEME = "tokenbus-theme";
const OPEN = "tokenbus-chat-open";

const store = new Store();
const chat = new Chat(store, defaults);
const thread = new Thread(chat);
const composer = new Composer(chat);
const settings = new Settings(chat);
const sidebar = new Sidebar(chat, store);

composer.addEventListener("sent", () => thread.toEnd());
chat.addEventListener("change", () => {
  sessionStorage.setItem(OPEN, chat.conversation.id);
  document.title = chat.conversation.title ? `${chat.conversation.title} – Tokenbus` : "Tokenbus";
});
chat.addEventListener("fault", ({ detail }) => {
  setText(byId("store-fault"), detail);
  byId("store-fault").hidden = false;
});

const theme = byId("theme");
theme.value = localStorage.getItem(THEME) ?? "";
function applyTheme() {
  document.documentElement.dataset.theme = theme.value;
  localStorage.setItem(THEME, theme.value);
}
theme.addEventListener("change", applyTheme);
applyTheme();

const [last] = await sidebar.refresh();
const open = sessionStorage.getItem(OPEN) ?? last?.id;
if (open) await chat.open(open).catch(() => chat.create());
else chat.create();
settings.refreshModels();
