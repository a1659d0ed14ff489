// AICI's interface for scripts (jsctrl): the names of its module "aici", which are globals too.
// Source: AICI's aici.js and jssamples, as ../shared/spec/aici-scripts.md lists them.

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
    const tokens = await generate({ maxTokens: 20, ...options });
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
  static noop() { return decide.sample(); }
}

class NextToken {
  preProcess() {}
  midProcess() { return decide.sample(); }
  postProcess(backtrack, tokens) {}
  isFixed() { return false; }
  run() { return ask(new Steps(this), "NextToken.run"); }
  then(resolve, reject) { return this.run().then(resolve, reject); }
}

Object.assign(aici, { Label, TokenSet, NextToken, MidProcessResult, Buffer: Bytes });
Object.assign(globalThis, aici, { Controller, decide, console: {
  log, info: log, warn: log, error: log, debug: log } });

calls.exported = [...Object.keys(aici), "Controller", "decide"];
