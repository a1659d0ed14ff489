// AICI's interface for scripts (jsctrl): the names of its module "aici", which are globals too.
// Source: AICI's aici.js, and its samples in jssamples.

let log_level = 0;

function logged(level, ...values) {
  if (log_level >= level) log(...values);
}

const aici = {
  start(main) { started = main; },
  test(main) {
    started = async () => {
      await main();
      host.log("TEST OK\n");
    };
  },
  async fixed(text) {
    logged(1, "FIXED", text);
    return append(text);
  },
  $(parts, ...values) {
    return aici.fixed(parts.reduce((text, part, i) => text + String(values[i - 1]) + part));
  },
  async genTokens(options = {}) {
    const { tokens } = await generate({ maxTokens: 20, ...options });
    logged(1, "GEN", host.text(tokens));
    return tokens;
  },
  async gen(options) { return host.text(await aici.genTokens(options)); },
  fork: forked,
  forkSupported: () => true,
  async waitVars(...names) {
    const values = await ask(new WaitFor(names), "waitVars");
    return values.map((value) => new Bytes(value));
  },
  getVar(name) {
    const found = vars.read(name);
    return found === null ? null : found.value;
  },
  setVar(name, value) { vars.set(name, value); },
  appendVar(name, value) { vars.append(name, value); },
  checkVar(name, text) {
    const found = vars.get(name);
    aici.assert(found === String(text), `variable ${name}: ${show(found)} != ${show(text)}`);
  },
  checkVars(expected) {
    for (const [name, text] of Object.entries(expected)) aici.checkVar(name, text);
  },
  async getPrompt() { return context.prompt; },
  getPromptLen: () => sequence.promptLength,
  getTokens: () => context.tokens,
  tokenize: (text) => host.tokenize(text),
  detokenize: (tokens) => new Bytes(host.bytes(tokens)),
  tokenRepr: (token) => JSON.stringify(host.text([token])),
  tokensRepr: (tokens) => tokens.map(aici.tokenRepr).join(", "),
  eosToken: () => host.word(EOS),
  selfSeqId: () => host.seq(),
  getConfig: (name) => ["fork", "backtrack", "ff_tokens"].includes(name) ? 1 : 0,
  setLogLevel(level) { log_level = level; },
  inspect: show,
  assert(condition, message = "assertion failed") {
    if (!condition) throw new Error(message);
  },
  print: log,
  log,
};

class MidProcessResult extends Decision {
  static bias(set) { return decide.sample({ allow: set }); }
  static splice(backtrack, tokens) { return decide.splice(backtrack, tokens); }
  static stop() { return decide.stop(); }
  static noop() { return NOOP; }
}

// A constraint on a text that grows by tokens. This base class allows every token.
class Constraint {
  #kind = "";
  #argument = "";
  #text = [];
  #answer = null;
  constrain(kind, argument) {
    if (typeof argument !== "string" || !argument)
      throw new TypeError(`${this.constructor.name} with ${show(argument)}; expected text`);
    this.#kind = kind;
    this.#argument = argument;
    return this;
  }
  #look() {
    if (this.#answer === null && this.#kind) {
      const [flags, mask] = host.nextTokens(this.#kind, this.#argument, this.#text);
      this.#answer = { mayEnd: (flags & 1) !== 0, ends: (flags & 2) !== 0, set: new TokenSet() };
      this.#answer.set.words = new Uint32Array(mask);
    } else if (this.#answer === null) {
      this.#answer = { mayEnd: true, ends: false, set: new TokenSet().setAll(true) };
    }
    return this.#answer;
  }
  eosAllowed() { return this.#look().mayEnd; }
  eosForced() { return this.#look().ends; }
  tokenAllowed(token) { return this.#look().set.has(token); }
  appendToken(token) {
    if (token === host.word(EOS)) return;
    this.#text.push(token);
    this.#answer = null;
  }
  allowTokens(set) { set.words.set(this.#look().set.words); }
}

class RegexConstraint extends Constraint {
  constructor(pattern) { super().constrain("regex", CONSTRAINTS.regex(pattern)); }
}

class CfgConstraint extends Constraint {
  constructor(grammar) { super().constrain("yacc", grammar); }
}

class SubStrConstraint extends Constraint {
  constructor(template, stopAt = '"') {
    super().constrain("combination", JSON.stringify({ sequence: [{ substring: template }, stopAt] }));
  }
}

class ChooseConstraint extends Constraint {
  constructor(options) { super().constrain("choice", JSON.stringify(options)); }
}

class NextToken {
  finished = false;
  preProcess() {}
  midProcess() { return decide.sample(); }
  postProcess(backtrack, tokens) {}
  isFixed() { return false; }
  run() { return ask(new Steps(this), "NextToken.run"); }
  then(resolve, reject) { return this.run().then(resolve, reject); }
}

// Samples a token that the constraint of makeConstraint() allows, or ends the text.
class ConstrainedToken extends NextToken {
  #constraint = null;
  constructor(makeConstraint) {
    super();
    this.makeConstraint = makeConstraint;
  }
  midProcess() {
    this.#constraint ??= this.makeConstraint();
    const set = new TokenSet();
    this.#constraint.allowTokens(set);
    if (!set.numSet()) set.add(host.word(EOS));
    return MidProcessResult.bias(set);
  }
  postProcess(backtrack, tokens) {
    for (const token of tokens) this.#constraint.appendToken(token);
    if (this.#constraint.eosForced()) this.finished = true;
  }
}

Object.assign(aici, {
  Label, TokenSet, NextToken, MidProcessResult, Buffer: Bytes, ConstrainedToken, Constraint,
  RegexConstraint, CfgConstraint, SubStrConstraint, ChooseConstraint,
});
Object.assign(globalThis, aici, { Controller, decide, console: {
  log, info: log, warn: log, error: log, debug: log } });

calls.exported = [...Object.keys(aici), "Controller", "decide"];
