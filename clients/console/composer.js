// The form that starts a generation, and the errors at its fields.

import { byId, el } from "./dom.js";
import { Editor } from "./editor.js";
import { EXAMPLES } from "./examples.js";
import { bytes } from "./format.js";
import { placeOf } from "./places.js";

const ARGUMENTS = {
  regex: ["Regular expression", "Python's syntax. The expression must match the whole text."],
  yacc: ["Grammar", "An LR(1) grammar in yacc's form, or a name: json, c, sql_select, …"],
  json_schema: ["JSON schema", "The text is one value that the schema allows."],
  choice: ["Choices", "One choice on each line."],
  python: ["Script", "async def main(ctx) or class Main(Controller), in MicroPython."],
  javascript: ["Script", "async function main(ctx) or class Main extends Controller."],
  controller: ["Argument", "The argument of the controller."],
};
/** The controllers that run the script in their argument. */
const SCRIPTS = { python: "gh:microsoft/aici/pyctrl", javascript: "gh:microsoft/aici/jsctrl" };
const FIELDS = ["max_tokens", "temperature", "seed", "n", "top_logprobs"];
const LABELLED = ["model", ...FIELDS];

/** The form. Events: `generate` with the fields of a GENERATE as its `detail`, and `stop`. */
export class Composer extends EventTarget {
  #form = byId("composer");
  #prompt = byId("prompt");
  #editor = new Editor(byId("editor"), "argument-text", "argument-fault", "argument-hint");
  #kind = "";
  #texts = {};
  #served = [];
  #stored = [];
  #uploads = 0;
  #connection;
  /**
   * The prompt and the request of the last call of `replay`. If the prompt is unchanged and no
   * controller is chosen, the form sends this request.
   */
  #replayed = null;

  constructor(connection) {
    super();
    this.#connection = connection;
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.#form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#submit();
    });
    for (const radio of this.#form.elements.kind) {
      radio.addEventListener("change", () => this.#choose(radio.value));
    }
    byId("stop").addEventListener("click", () => this.dispatchEvent(new Event("stop")));
    byId("upload").addEventListener("change", () => this.#upload());
    const example = byId("example");
    example.append(...EXAMPLES.map(({ name }, i) => el("option", { value: i }, name)));
    example.addEventListener("change", () => {
      if (example.value !== "") this.fill(EXAMPLES[example.value]);
      example.value = "";
    });
    this.fill(EXAMPLES[2]);
  }

  /** Sets the prompt, the kind of controller and its argument; uploads the module, if given. */
  fill({ kind, prompt, argument = "", module = "" }) {
    this.#texts[kind] = argument;
    this.#prompt.value = prompt;
    for (const radio of this.#form.elements.kind) radio.checked = radio.value === kind;
    this.#kind = kind;
    this.#show();
    if (!module) return;
    // Until the module is stored, a request must not name the previous controller.
    byId("controller").value = "";
    this.#uploadExample(module);
  }

  /** Generates an answer again: `text` is its prompt, and `generate` has the fields of its request. */
  replay({ text, generate }) {
    this.fill({ kind: "", prompt: text });
    this.#replayed = { text: this.#prompt.value, generate };
    for (const name of ["model", "max_tokens", "temperature", "seed", "n"]) {
      byId(name).value = generate[name] ?? "";
    }
    this.#submit();
  }

  /** Sets whether a generation is running. */
  set running(running) {
    if (!running && document.activeElement === byId("stop")) byId("generate").focus();
    byId("stop").hidden = !running;
  }

  /** Sets the names that a field suggests. `list`: `models` or `controllers`. */
  suggest(list, names) {
    byId(list).replaceChildren(...names.map((name) => el("option", { value: name })));
  }

  /** Sets the names of controllers that workers serve, such as those of `tokenbus controller serve`. */
  set served(names) {
    this.#served = names;
    this.#suggestControllers();
  }

  /** Requests the stored modules, and suggests their names. */
  async refreshModules() {
    const { result } = await this.#connection.request("TAGS");
    this.#stored = result.flatMap((m) => (m.tags?.length ? m.tags : [m.module]));
    this.#suggestControllers();
  }

  #suggestControllers() {
    this.suggest("controllers", [...this.#served, ...this.#stored]);
  }

  /** Shows an error at its field, or below the form if the error does not belong to a field. */
  showFault({ code, path, message }) {
    const field = code === "unknown_model" ? "model" : path?.match(/^\$\.(\w+)/)?.[1];
    if (code === "unknown_controller" || field === "controller") {
      return this.#faultAt(this.#kind === "controller" ? "controller" : "request", message);
    }
    const inScript = this.#kind in SCRIPTS && /\bline \d+: /.test(message);
    if (inScript || (this.#kind && (field === "controller_arg" || (code === "invalid_field" && !field)))) {
      return this.#argumentFault(message);
    }
    if (field === "prompt") return this.#faultAt("prompt", message);
    if (!LABELLED.includes(field)) return this.#faultAt("request", message);
    byId(field).closest("details").open = true;
    return this.#faultAt(field, inWordsOfThePage(field, message));
  }

  #argumentFault(message) {
    const text = message.replace(new RegExp(`^${this.#kind}: `), "").replace(/ \[\w+\]$/, "");
    const place = placeOf(this.#kind, text, this.#editor.text);
    this.#editor.mark(place);
    this.#editor.invalid();
    const fault = this.#faultAt("argument", text.replace(/^line \d+, column \d+: /, ""));
    if (!place) return;
    const go = el("button.place", { type: "button" }, `Line ${place.line}, column ${place.column}`);
    go.addEventListener("click", () => this.#editor.goToMark());
    fault.prepend(go, " ");
  }

  #faultAt(name, message) {
    const fault = byId(`${name}-fault`);
    fault.textContent = message.charAt(0).toUpperCase() + message.slice(1);
    fault.hidden = false;
    byId(name)?.setAttribute("aria-invalid", "true");
    return fault;
  }

  #clearFaults() {
    for (const fault of this.#form.querySelectorAll(".fault")) fault.hidden = true;
    for (const field of this.#form.querySelectorAll("[aria-invalid]")) {
      field.removeAttribute("aria-invalid");
    }
    this.#editor.mark(null);
  }

  #choose(kind) {
    this.#texts[this.#kind] = this.#editor.text;
    this.#kind = kind;
    this.#show();
  }

  #show() {
    this.#clearFaults();
    byId("argument").hidden = !this.#kind;
    byId("module").hidden = this.#kind !== "controller";
    const [label, hint] = ARGUMENTS[this.#kind] ?? ["", ""];
    byId("argument-label").textContent = label;
    byId("argument-hint").textContent = hint;
    this.#editor.text = this.#texts[this.#kind] ?? "";
    this.#enable();
  }

  /** Disables the button Generate while the controller for a request is being uploaded. */
  #enable() {
    byId("generate").disabled = this.#kind === "controller" && this.#uploads > 0;
  }

  #submit() {
    if (byId("generate").disabled) return;
    this.#clearFaults();
    const exact = !this.#kind && this.#replayed?.text === this.#prompt.value;
    const fields = exact ? this.#replayed.generate : { prompt: this.#prompt.value };
    const request = { ...fields, text: true, inspect: true };
    const model = byId("model").value.trim();
    if (model) request.model = model;
    for (const name of FIELDS) {
      const value = byId(name).value;
      if (value !== "") request[name] = Number(value);
    }
    // The page shows the seed, so that the same tokens can be generated again.
    request.seed ??= crypto.getRandomValues(new Uint32Array(1))[0];
    if (this.#kind) request.controller = SCRIPTS[this.#kind] ?? this.#kind;
    if (this.#kind === "controller") request.controller = byId("controller").value.trim();
    if (this.#kind === "choice") {
      request.controller_arg = this.#editor.text.split("\n").filter((line) => line !== "");
    } else if (this.#kind) request.controller_arg = this.#editor.text;
    if (request.controller === "") {
      this.#faultAt("controller", "the controller is missing; give a tag, or upload a module");
      return;
    }
    this.dispatchEvent(new CustomEvent("generate", { detail: request }));
  }

  async #upload() {
    const input = byId("upload");
    const file = input.files[0];
    if (file) await this.#store(file.name.replace(/\.wasm$/, ""), async () => file);
    input.value = "";
  }

  #uploadExample(name) {
    return this.#store(`example-${name}`, async () => {
      const answer = await fetch(new URL(`console/${name}.wasm`, location.href));
      if (!answer.ok) throw new Error(`the gateway does not have the example ${name}.wasm`);
      return answer.blob();
    });
  }

  /** Uploads the module that `read` returns as a file, under a tag. */
  async #store(tag, read) {
    this.#clearFaults();
    const said = byId("uploaded");
    said.textContent = `Uploading ${tag} …`;
    this.#uploads += 1;
    this.#enable();
    try {
      const file = await read();
      const { result } = await this.#connection.request("UPLOAD", {
        data: await base64(file),
        tag,
      });
      this.#clearFaults();
      byId("controller").value = tag;
      const why = result.why_no_fork ? `: ${result.why_no_fork}` : "";
      const what = result.forks === false ? `, whose sequences cannot fork${why}` : "";
      said.textContent = `${tag}: ${bytes(result.size)}, ${result.abi} ABI${what}`;
      await this.refreshModules();
    } catch (fault) {
      said.textContent = "";
      this.#faultAt("controller", fault.message);
    } finally {
      this.#uploads -= 1;
      this.#enable();
    }
  }
}

/** The message of an error, with the label of the field instead of the field's name in requests. */
function inWordsOfThePage(field, message) {
  const label = byId(field).labels[0].firstChild.textContent.trim();
  const text = message
    .replace(/,? \(?at `?\$[^)]*$/, "")
    .replace("`int`", "a whole number")
    .replace("`float`", "a number")
    .replace(" >= ", " of at least ")
    .replace(" <= ", " of at most ");
  if (text.startsWith(`${field} `)) return label + text.slice(field.length);
  return `${label}: ${text.charAt(0).toLowerCase()}${text.slice(1)}`;
}

function base64(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
