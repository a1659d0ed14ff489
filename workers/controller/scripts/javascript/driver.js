// The calls that the host makes, and the operations that a script waits for.
//
// boot.js is the concatenation of driver.js, context.js and aici.js in one function. `host` has the
// imports of the ABI (engine.c). A fork copies the memory of the interpreter, so the script
// continues in each new sequence without a replay.

const STOP = 0, CONTINUE = 1, SUSPEND = 2, FORK = 3, SPLICE = 4, GENERATE = 5, SCORE = 6,
      BEGIN = 7, SAVE = 8, OPEN = 9, LOOK = 10, AGAIN = 11, SAMPLE_SCORED = 12;
const REFUSED = 0xffffffff;  // value of post's `backtrack`: tokens are an error's text
const SCORED = 0xfffffffe;  // value of post's `backtrack`: log-probabilities follow the tokens

// The words of the call block.
const VOCABULARY = 7, EOS = 12, MAX_TOKENS = 13;

const sequence = { tokens: [], promptLength: 0, arg: "" };

let pending = null;  // the operation that the script waits for
let program = null;  // the object of a class with the four calls
let started = null;  // the coroutine given to start()
let ended = false;

function place() {
  const found = /\bscript:(\d+)/.exec(new Error().stack);
  return found ? `line ${found[1]}` : "";
}

function describe(error) {
  if (!(error instanceof Error)) return `the script threw ${String(error)}`;
  const found = /\bscript:(\d+)/.exec(String(error.stack));
  const line = found ? found[1] : error.fileName === "script" ? error.lineNumber : 0;
  const text = `${error.name}: ${error.message}`;
  const where = line ? `line ${line}` : error.place;
  return where ? `${where}: ${text}` : text;
}

// Each operation has pre, mid and post, which correspond to the calls of a controller. Any of them
// may finish the operation. mid returns null if pre_process has to be called first. The argument
// logprobs of post is empty unless the operation asked for log-probabilities.
class Operation {
  finished = false;
  answer = undefined;
  error = null;
  place = "";  // the position of the call in the script, for the error if the worker refuses it
  pre() { return CONTINUE; }
  mid(group) { return null; }
  post(tokens, backtrack, logprobs) {}
  finish(answer) { this.finished = true; this.answer = answer; }
  refuse(reason) {
    this.finished = true;
    this.error = Object.assign(new Error(reason), { place: this.place });
  }
}

class End extends Operation {
  pre() { return STOP; }
  mid(group) { return STOP; }
}

class Append extends Operation {
  constructor(tokens, drop) {
    super();
    this.tokens = tokens;
    this.drop = drop;
    if (!tokens.length && !drop) this.finish();
  }
  pre() {
    if (this.drop) return CONTINUE;
    host.tokens(this.tokens);
    return SPLICE;
  }
  mid(group) {
    host.drop(this.drop);
    host.tokens(this.tokens);
    return SPLICE;
  }
  post(tokens, backtrack) { this.finish(); }
}

// The worker generates a text under a constraint, and passes all tokens of the text to post. The
// answer is {tokens, logprobs}, as in GenerateAllowed.
class Generate extends Operation {
  constructor(spec, bias) {
    super();
    this.spec = JSON.stringify(spec);
    this.bias = bias;
    this.place = spec.place;
  }
  mid(group) {
    give_bias(this.bias);
    host.generate(this.spec);
    return GENERATE;
  }
  post(tokens, backtrack, logprobs) { this.finish({ tokens, logprobs }); }
}

// Scores texts, which are lists of tokens. The host passes the log-probabilities of their tokens to
// post, as the bits of float32 numbers.
class Score extends Operation {
  constructor(texts) {
    super();
    this.texts = texts;
  }
  mid(group) {
    host.generate(JSON.stringify(this.texts));
    return SCORE;
  }
  post(words, backtrack) {
    const numbers = Array.from(new Float32Array(Uint32Array.from(words).buffer));
    this.finish(this.texts.map((text) => numbers.splice(0, text.length)));
  }
}

// Reads the distribution of the next token. The host passes pairs of a token and its log-probability
// to post, as words of 32 bits.
class Look extends Operation {
  constructor(top) {
    super();
    this.top = top;
  }
  mid(group) {
    host.generate(JSON.stringify(this.top));
    return LOOK;
  }
  post(words, backtrack) {
    const numbers = new Float32Array(Uint32Array.from(words).buffer);
    const pairs = [];
    for (let i = 0; i < words.length; i += 2) pairs.push([words[i], numbers[i + 1]]);
    this.finish(pairs);
  }
}

// Replaces all tokens of the sequence by a new prompt.
class Begin extends Operation {
  constructor(prompt) {
    super();
    this.prompt = prompt;
  }
  mid(group) {
    host.tokens(this.prompt);
    return BEGIN;
  }
  post(tokens, backtrack) {
    sequence.promptLength = tokens.length;
    this.finish();
  }
}

// Saves the sequence as a context, or replaces its tokens by those of a context.
class UseContext extends Operation {
  constructor(action, given) {
    super();
    this.action = action;
    this.given = given;
    this.place = place();
  }
  mid(group) {
    const tokens = this.action === SAVE ? sequence.tokens : [];
    host.generate(JSON.stringify({ ...this.given, tokens }));
    return this.action;
  }
  post(tokens, backtrack) {
    if (backtrack) sequence.promptLength = tokens.length;
    this.finish();
  }
}

// Samples only tokens in `mask`, until the text has `max` tokens, contains a stop text or ends.
class GenerateAllowed extends Operation {
  constructor(mask, bias, stops, max, scored) {
    super();
    this.mask = mask;
    this.bias = bias;
    this.stops = stops;
    this.max = max;
    this.scored = scored;
    this.tokens = [];
    this.logprobs = [];
    this.repair = null;
  }
  mid(group) {
    if (this.repair) {
      host.drop(this.repair[0]);
      host.tokens(this.repair[1]);
      return SPLICE;
    }
    host.mask(this.mask);
    give_bias(this.bias);
    return this.scored ? SAMPLE_SCORED : CONTINUE;
  }
  post(tokens, backtrack, logprobs) {
    if (this.repair) return this.end(0, []);
    for (let i = 0; i < tokens.length; i++) {
      if (tokens[i] === host.word(EOS)) return this.end(tokens.length - i, []);
      this.tokens.push(tokens[i]);
      this.logprobs.push(logprobs.length ? logprobs[i] : null);
      const more = tokens.length - i - 1;
      const text = this.stops.length ? host.text(this.tokens) : "";
      const ends = this.stops.map((s) => text.indexOf(s) < 0 ? -1 : text.indexOf(s) + s.length);
      const end = Math.min(...ends.filter((e) => e >= 0));
      if (end < text.length) {
        this.tokens.pop();
        const again = host.tokenize(text.slice(host.text(this.tokens).length, end));
        this.tokens.push(...again);
        this.logprobs.splice(-1, 1, ...again.map(() => null));
        return this.end(more + 1, again);
      }
      if (end === text.length && this.stops.length) return this.end(more, []);
      if (this.tokens.length === this.max) return this.end(more, []);
    }
  }
  end(drop, tokens) {
    if (drop) this.repair = [drop, tokens];
    else this.finish({ tokens: this.tokens, logprobs: this.logprobs });
  }
}

class Fork extends Operation {
  constructor(count) {
    super();
    this.count = count;
    this.made = false;
  }
  pre() {
    this.made = true;
    host.count(this.count);
    return FORK;
  }
  mid(group) {
    if (this.made) this.finish(group.indexOf(host.seq()));
    return null;
  }
}

class WaitFor extends Operation {
  constructor(names) {
    super();
    this.names = names;
  }
  pre() {
    const found = this.names.map((name) => host.varGet(name));
    if (found.every((value) => value !== null)) this.finish(found.map((value) => value[1]));
    return SUSPEND;
  }
}

class Receive extends Operation {
  pre() {
    const text = host.receive();
    if (text !== null) this.finish(text);
    return SUSPEND;
  }
}

// Calls a tool. The answer is the JSON of its record: {"value": …} or {"error": …}.
class CallTool extends Operation {
  constructor(tool, given) {
    super();
    this.tool = tool;
    this.given = given;
    this.record = null;
  }
  pre() {
    if (this.record === null) this.record = host.toolCall(this.tool, this.given);
    const [, data] = host.varGet(this.record);
    const text = host.decode(data);
    if (text[0] !== "\0") this.finish(text);
    return SUSPEND;
  }
}

// One step, which an object decides with its methods, as in AICI's NextToken. The answer is the
// tokens of the step.
class Steps extends Operation {
  constructor(object) {
    super();
    this.object = object;
    this.appended = null;
  }
  pre() { return decided(this.object.preProcess(), "preProcess"); }
  mid(group) {
    const decision = this.object.midProcess();
    if (decision === NOOP) {
      this.post([], 0);
      return CONTINUE;
    }
    return decided(decision, "midProcess");
  }
  post(tokens, backtrack) {
    this.object.finished = tokens.includes(host.word(EOS));
    this.object.postProcess(backtrack, tokens);
    this.finish(tokens);
  }
}

function give_bias(bias) {
  if (bias) host.bias(bias.data, bias.pairs);
}

function ask(operation, name) {
  if (pending) {
    // The error rejects the promise of this call. If the script does not await this call either,
    // the error would be lost, so it is also stored.
    failure = { error: new Error(`${name}: the script has to await its previous call first`) };
    throw failure.error;
  }
  if (ended) throw new Error(`${name}: the script has ended`);
  return new Promise((resolve, reject) => {
    if (operation.finished) return resolve(operation.answer);
    operation.resolve = resolve;
    operation.reject = reject;
    pending = operation;
  });
}

// Runs the script until it waits for an unfinished operation, and returns this operation.
function current() {
  while (pending === null || pending.finished) {
    const last = pending;
    pending = null;
    if (last && last.error) {
      last.reject(last.error);
      if (ended) throw last.error;  // The script has ended without awaiting the call.
    } else if (last) last.resolve(last.answer);
    host.jobs();
    if (failure) throw failure.error;
    if (pending === null) {
      if (!ended)
        throw new Error("the script awaits something that never happens; it may only await the " +
                        "calls of its context");
      pending = new End();
    }
  }
  return pending;
}

let failure = null;

function begin(main, ...given) {
  Promise.resolve().then(() => main(...given)).then(
    (value) => {
      ended = true;
      if (value !== undefined) host.log(`${show(value)}\n`);
    },
    (error) => { failure = { error }; });
}

// --- decisions of classes ------------------------------------------------------------------------

class Decision {
  constructor(action, fields = {}) {
    this.action = action;
    Object.assign(this, fields);
  }
}

function tokens_of(what) {
  if (typeof what === "string" || ArrayBuffer.isView(what)) return host.tokenize(what);
  if (!Array.isArray(what)) throw new TypeError("expected text or a list of token ids");
  return what;
}

const decide = {
  goOn: () => new Decision(CONTINUE),
  stop: () => new Decision(STOP),
  suspend: () => new Decision(SUSPEND),
  fork: (count) => new Decision(FORK, { count: whole("decide.fork(n)", count) }),
  append: (what) => new Decision(SPLICE, { tokens: tokens_of(what), backtrack: 0 }),
  splice: (backtrack, what = []) => new Decision(SPLICE, { tokens: tokens_of(what), backtrack }),
  sample: ({ allow = null, bias = null } = {}) =>
    new Decision(CONTINUE, {
      mask: allow === null ? null : token_set(allow).words,
      bias: bias_of(bias),
    }),
};

// A decision of midProcess: no token is sampled, and the script continues in the same round.
const NOOP = new Decision(CONTINUE);

const MAY = {
  preProcess: [STOP, CONTINUE, SUSPEND, FORK, SPLICE],
  midProcess: [STOP, CONTINUE, SPLICE],
  postProcess: [STOP, CONTINUE],
};

function decided(decision, call) {
  if (decision === undefined && call !== "midProcess") return CONTINUE;
  if (!(decision instanceof Decision) || !MAY[call].includes(decision.action))
    throw new TypeError(`${call} returned ${show(decision)}, which is not a decision of this call`);
  const { action, count, tokens, backtrack, mask, bias } = decision;
  if (count) host.count(count);
  if (tokens) host.tokens(tokens);
  if (backtrack) host.drop(backtrack);
  if (mask) host.mask(mask);
  if (bias) give_bias(bias);
  return action;
}

class Controller {
  initPrompt(prompt) {}
  preProcess() {}
  midProcess(group) { return decide.sample(); }
  postProcess(tokens, backtrack) {
    return tokens.includes(host.word(EOS)) ? decide.stop() : decide.goOn();
  }
}

// --- the four calls ------------------------------------------------------------------------------

const calls = {
  describe,

  init(prompt, arg) {
    sequence.tokens = prompt;
    sequence.promptLength = prompt.length;
    sequence.arg = arg;
    const { main, Main } = globalThis.__script || {};
    delete globalThis.__script;
    if (started) {
      begin(started);
    } else if (typeof Main === "function") {
      program = new Main();
      program.initPrompt(prompt.slice());
      return 1;
    } else if (typeof main === "function") {
      begin(main, context);
    } else {
      throw new Error("the script does not define async function main(ctx), class Main extends " +
                      "Controller, or call start(main)");
    }
    current();
    return 1;
  },

  pre() {
    if (program) return decided(program.preProcess(), "preProcess");
    for (;;) {
      const operation = current();
      const action = operation.pre();
      if (!operation.finished) return action;
    }
  },

  mid(group) {
    if (program) return decided(program.midProcess(group), "midProcess");
    for (;;) {
      const operation = current();
      const action = operation.mid(group);
      // After a fork, a script can suspend or fork again only in pre_process.
      if (!operation.finished) return action === null ? AGAIN : action;
    }
  },

  post(tokens, backtrack) {
    if (backtrack === REFUSED) {
      pending.refuse(host.decode(Uint8Array.from(tokens)));
      return CONTINUE;
    }
    let logprobs = [];
    if (backtrack === SCORED) {
      const words = Uint32Array.from(tokens.splice(tokens.length / 2));
      logprobs = Array.from(new Float32Array(words.buffer), (x) => Number.isNaN(x) ? null : x);
      backtrack = 0;
    }
    const reads = pending instanceof Score || pending instanceof Look;
    const answer = reads || pending instanceof UseContext && !backtrack;
    if (answer) {
      pending.post(tokens, backtrack);
      return CONTINUE;
    }
    if (backtrack) sequence.tokens.length -= backtrack;
    for (let i = 0; i < tokens.length; i++) sequence.tokens.push(tokens[i]);
    if (program) return decided(program.postProcess(tokens, backtrack), "postProcess");
    if (pending) pending.post(tokens, backtrack, logprobs);
    return CONTINUE;
  },
};
