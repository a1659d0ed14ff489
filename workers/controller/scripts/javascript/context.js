// The context of a script: the argument of `async function main(ctx)`.

function show(value) {
  if (typeof value === "string") return value;
  if (value instanceof Error) return describe(value);
  try {
    const text = JSON.stringify(value);
    return text === undefined ? String(value) : text;
  } catch (error) {
    return String(value);
  }
}

// Formats an argument for an error. Texts get quotation marks.
function quote(value) { return typeof value === "string" ? JSON.stringify(value) : show(value); }

function whole(what, value, least = 1) {
  if (!Number.isInteger(value) || value < least)
    throw new TypeError(`${what} with ${quote(value)}; expected a number, at least ${least}`);
  return value;
}

// A set of tokens, as a mask: bit i of the words is token i.
class TokenSet {
  constructor(tokens = []) {
    this.length = host.word(VOCABULARY);
    this.words = new Uint32Array(Math.ceil(this.length / 32));
    for (const token of tokens) this.add(token);
  }
  add(token) {
    this.words[this.check(token) >> 5] |= 1 << (token & 31);
    return this;
  }
  delete(token) {
    this.words[this.check(token) >> 5] &= ~(1 << (token & 31));
    return this;
  }
  has(token) { return (this.words[token >> 5] >>> (token & 31) & 1) === 1; }
  setAll(value) {
    this.words.fill(value ? 0xffffffff : 0);
    if (value && this.length & 31) this.words[this.words.length - 1] = (1 << (this.length & 31)) - 1;
    return this;
  }
  toJSON() { return `TokenSet(${this.numSet()} of ${this.length} tokens)`; }
  numSet() {
    let count = 0;
    for (let word of this.words) for (; word; word &= word - 1) count++;
    return count;
  }
  check(token) {
    if (!Number.isInteger(token) || token < 0 || token >= this.length)
      throw new RangeError(`token ${show(token)} is not in the vocabulary, which is 0 to ` +
                           `${this.length - 1}`);
    return token;
  }
}

function token_set(tokens) {
  const set = tokens instanceof TokenSet ? tokens : new TokenSet(tokens);
  if (!set.numSet()) throw new RangeError("the set of allowed tokens is empty");
  return set;
}

// Converts a bias ({token: value}, or a value for each token) to the bytes that the host reads.
function bias_of(values) {
  if (values === null || values === undefined) return null;
  if (Array.isArray(values) || ArrayBuffer.isView(values))
    return { data: Float32Array.from(values), pairs: 0 };
  const entries = values instanceof Map ? [...values] : Object.entries(values);
  const data = new DataView(new ArrayBuffer(8 * entries.length));
  entries.forEach(([token, value], i) => {
    data.setUint32(8 * i, Number(token), true);
    data.setFloat32(8 * i + 4, value, true);
  });
  return entries.length ? { data: data.buffer, pairs: entries.length } : null;
}

class Label {
  constructor() { this.position = sequence.tokens.length; }
  tokensSince() { return sequence.tokens.slice(this.position); }
  textSince() { return host.text(this.tokensSince()); }
  fixedAfter(text) { return append(text, this); }
  fixAfter(text) { return append(text, this); }
}

function position(label, what) {
  if (!(label instanceof Label)) throw new TypeError(`${what}: expected a label`);
  return label.position;
}

function append(text, following) {
  if (typeof text !== "string" && !ArrayBuffer.isView(text))
    throw new TypeError(`fixed(text) with ${show(text)}; expected text or bytes`);
  const after = following ? position(following, "fixed({following})") : sequence.tokens.length;
  const drop = sequence.tokens.length - after;
  if (drop < 0)
    throw new RangeError(`fixed({following}): the label is at ${after} tokens, but the sequence ` +
                         `was cut back to ${sequence.tokens.length}`);
  return ask(new Append(text.length ? host.tokenize(text) : [], drop), "fixed");
}

const CONSTRAINTS = {
  regex: (value) => value instanceof RegExp ? (value.ignoreCase ? "(?i)" : "") + value.source : value,
  choice: (value) => JSON.stringify(value),
  jsonSchema: (value) => typeof value === "string" ? value : JSON.stringify(value),
  lark: (value) => value,
  yacc: (value) => value,
  substring: (value) => typeof value === "string" ? JSON.stringify({ text: value }) : value,
};
const ALIASES = { json_schema: "jsonSchema", stop_at: "stopAt", max_tokens: "maxTokens",
                  options: "choice", substring_end: "substringEnd", store_var: "storeVar" };
const OPTIONS = ["allow", "bias", "stopAt", "maxTokens", "logprobs", "storeVar", "substringEnd"];

function generation(given) {
  if (typeof given !== "object" || given === null)
    throw new TypeError(`gen(${quote(given)}); expected an object such as {maxTokens: 5}`);
  const options = {};
  for (const [name, value] of Object.entries(given)) {
    const known = ALIASES[name] || name;
    if (!(known in CONSTRAINTS) && !OPTIONS.includes(known))
      throw new TypeError(`gen({${name}}) is unknown; expected ` +
                          [...Object.keys(CONSTRAINTS), ...OPTIONS].join(", "));
    if (value !== null && value !== undefined) options[known] = value;
  }
  const kinds = Object.keys(options).filter((name) => name in CONSTRAINTS || name === "allow");
  if (kinds.length > 1)
    throw new TypeError(`gen({${kinds.join(", ")}}): only one of these is allowed at a time`);
  const stops = [].concat(options.stopAt === undefined ? [] : options.stopAt);
  if (stops.some((stop) => typeof stop !== "string" || !stop))
    throw new TypeError(`gen({stopAt: ${show(options.stopAt)}}); expected text`);
  if (options.maxTokens !== undefined) whole("gen({maxTokens})", options.maxTokens);
  const { logprobs = false } = options;
  if (typeof logprobs !== "boolean")
    throw new TypeError(`gen({logprobs: ${quote(logprobs)}}); expected true or false`);
  return [options, kinds[0], stops];
}

// Generates a text, and returns {tokens, logprobs}.
async function generate(given = {}) {
  const [options, kind, stops] = generation(given);
  const bias = bias_of(options.bias);
  if (kind === "allow")
    return ask(new GenerateAllowed(token_set(options.allow).words, bias, stops,
                                   options.maxTokens, options.logprobs), "gen");
  const spec = { place: place(), stop_at: stops, max_tokens: options.maxTokens,
                 logprobs: options.logprobs };
  if (kind) {
    const argument = CONSTRAINTS[kind](options[kind]);
    if (typeof argument !== "string")
      throw new TypeError(`gen({${kind}: ${show(options[kind])}}); expected text`);
    spec.kind = kind === "jsonSchema" ? "json_schema" : kind;
    spec.argument = argument;
    if (kind === "substring" && options.substringEnd !== undefined) {
      spec.kind = "combination";
      spec.argument = JSON.stringify({ sequence: [
        { substring: options.substring }, options.substringEnd] });
    }
  }
  const found = await ask(new Generate(spec, bias), "gen");
  if (options.storeVar) host.varWrite(options.storeVar, host.bytes(found.tokens), false, -1);
  return found;
}

const ROLES = ["unk", "pad", "sep", "bos", "eos", "cls", "mask", "turn_start", "turn_end"];

// Bytes with AICI's method decode().
class Bytes extends Uint8Array {
  decode() { return host.decode(this); }
  toJSON() { return this.decode(); }
}

const vars = {
  read(name) {
    const found = host.varGet(String(name));
    return found === null ? null : { version: found[0], value: new Bytes(found[1]) };
  },
  get(name, otherwise = null) {
    const found = vars.read(name);
    return found === null ? otherwise : found.value.decode();
  },
  has(name) { return vars.read(name) !== null; },
  set(name, value, when = -1) { return written(name, value, false, when); },
  append(name, value, when = -1) { return written(name, value, true, when); },
};

function written(name, value, append, when) {
  if (typeof value !== "string" && !ArrayBuffer.isView(value) && !(value instanceof ArrayBuffer))
    throw new TypeError(`variable ${quote(name)} was set to ${show(value)}; expected text or bytes`);
  const [ok, version] = host.varWrite(String(name), value, append, when);
  return { ok, version };
}

function log(...values) { host.log(values.map(show).join(" ") + "\n"); }

async function forked(count) {
  return ask(new Fork(whole("fork(n)", count)), "fork");
}

const context = {
  async fixed(text, { following } = {}) { return append(text, following); },
  async gen(options) {
    const { tokens, logprobs } = await generate(options);
    const text = host.text(tokens);
    return options && options.logprobs ? { text, tokens, logprobs } : text;
  },
  async score(candidates, { perToken = false } = {}) {
    if (!Array.isArray(candidates) || !candidates.length)
      throw new TypeError(`score(${show(candidates)}); expected a list of texts`);
    const texts = candidates.map(tokens_of);
    if (texts.some((text) => !text.length))
      throw new TypeError(`score(${show(candidates)}); expected texts that are not empty`);
    const scores = await ask(new Score(texts), "score");
    return perToken ? scores : scores.map((text) => text.reduce((sum, each) => sum + each, 0));
  },
  async distribution({ top = 8 } = {}) {
    return ask(new Look(whole("distribution({top})", top, 0)), "distribution");
  },
  fork: forked,
  async save(name, { pinS = 300 } = {}) {
    if (typeof name !== "string" || typeof pinS !== "number")
      throw new TypeError(`save(${show(name)}); expected a name, and pinS as a number`);
    await ask(new UseContext(SAVE, { name, pin_s: pinS }), "save");
  },
  async open(name) {
    if (typeof name !== "string")
      throw new TypeError(`open(${show(name)}); expected the name of a context`);
    await ask(new UseContext(OPEN, { name }), "open");
  },
  async spawn(prompt) {
    const tokens = tokens_of(prompt);
    if (!tokens.length) throw new TypeError(`spawn(${show(prompt)}); expected a text`);
    const index = await forked(2);
    if (index) await ask(new Begin(tokens), "spawn");
    return index;
  },
  async waitVar(name) {
    const [value] = await ask(new WaitFor([name]), "waitVar");
    return host.decode(value);
  },
  async receive() { return ask(new Receive(), "receive"); },
  send(text) {
    if (typeof text !== "string")
      throw new TypeError(`send(text) with ${show(text)}; expected text`);
    host.send(text);
  },
  async call(tool, given = {}) {
    const json = JSON.stringify(given);
    if (typeof tool !== "string" || !tool || json === undefined || json[0] !== "{")
      throw new TypeError(`call(${show(tool)}, ${show(given)}); expected the name of a ` +
                          "tool and an object");
    const answer = JSON.parse(await ask(new CallTool(tool, json), "call"));
    if ("error" in answer) throw new Error(answer.error);
    return answer.value;
  },
  async stop() { return ask(new End(), "stop"); },
  vars,
  get prompt() { return sequence.tokens.slice(0, sequence.promptLength); },
  get tokens() { return sequence.tokens.slice(); },
  get arg() {
    if (!sequence.arg) return null;
    try { return JSON.parse(sequence.arg); } catch (error) { return sequence.arg; }
  },
  get seq() { return host.seq(); },
  get eos() { return host.word(EOS); },
  get vocabularySize() { return host.word(VOCABULARY); },
  // The tokens whose bytes pass a test.
  tokenSet(test) {
    const set = new TokenSet();
    for (let token = 0; token < set.length; token++) {
      const bytes = new Bytes(host.bytes([token]));
      if (bytes.length && test(bytes)) set.add(token);
    }
    return set;
  },
  specialToken(name) {
    const number = ROLES.indexOf(name);
    if (number < 0)
      throw new TypeError(`specialToken(${show(name)}); expected one of ${ROLES.join(", ")}`);
    const token = host.special(number);
    return token < 0 ? null : token;
  },
  label: () => new Label(),
  tokensSince(label) { return sequence.tokens.slice(position(label, "tokensSince(label)")); },
  textSince(label) { return host.text(context.tokensSince(label)); },
  tokenize: (text) => host.tokenize(text),
  text: (tokens) => host.text(tokens),
  log,
};

// Makes calls of unknown methods of `object` throw an error with the method's name, because the
// error of QuickJS is only "not a function". The call throws the error. The access does not throw,
// because QuickJS does not know the line of an access. Symbols, `then` and `toJSON` are excluded,
// because the language itself reads them.
function name_unknown(object, name) {
  const names = Object.keys(object).join(", ");
  Object.setPrototypeOf(object, new Proxy(Object.prototype, {
    get(base, key) {
      if (typeof key === "symbol" || key in base || key === "then" || key === "toJSON")
        return base[key];
      return () => { throw new TypeError(`${name} has no ${key}; expected one of ${names}`); };
    },
  }));
}
name_unknown(context, "ctx");
name_unknown(vars, "ctx.vars");
