// The state of a generation, collected from its TOKEN entries. This file does not draw.

/** A token that has arrived in a sequence. The `Item` is kept even if a splice drops the token. */
export class Item {
  /** Set when a splice drops the token. */
  taken = false;
  /** Set if the sequence inherited the token from its parent, and a splice then dropped it. */
  inherited = false;

  constructor(entry) {
    this.id = entry.token;
    this.text = entry.text ?? "";
    this.logprob = entry.logprob;
    this.pos = entry.pos ?? 0;
    this.likely = Object.entries(entry.top_logprobs ?? {})
      .map(([id, logprob]) => ({ id: Number(id), logprob }))
      .sort((a, b) => b.logprob - a.logprob);
    this.allowed = entry.allowed ?? null;
    this.cut = new Set(entry.cut ?? []);
    /** The controller's bias, by token. */
    this.bias = new Map(Object.entries(entry.bias ?? {}).map(([id, b]) => [Number(id), b]));
    this.roundUs = entry.round_us ?? 0;
  }

  /** The total probability of the likely tokens that the mask cut off. */
  get cutOff() {
    const cut = this.likely.filter(({ id }) => this.cut.has(id));
    return cut.reduce((sum, { logprob }) => sum + Math.exp(logprob), 0);
  }

  /** Whether the controller appended the token. Such a token was not sampled. */
  get appended() {
    return this.logprob === null;
  }
}

/**
 * A sequence. `items` are its tokens in order of arrival, including tokens that a splice dropped.
 */
export class Sequence {
  items = [];
  finish = null;
  error = null;
  constraint = null;
  splices = [];
  writes = [];
  /** Number of the sequence's own tokens that a splice dropped. */
  takenBack = 0;
  /**
   * The other sequence to which a controller has appended the text of this sequence, for example
   * because this sequence was the best of several.
   */
  chosenBy = null;
  /** The text that the controller appended after the last sampled token or splice. */
  run = "";

  constructor(seq, parent, from) {
    this.seq = seq;
    this.parent = parent;
    this.from = from;
    /** The current tokens, including tokens before the fork. */
    this.kept = parent ? parent.kept.slice(0, from) : [];
    this.inherited = this.kept.length;
  }

  get length() {
    return this.kept.length;
  }

  /** Number of tokens in `kept` that were not inherited from the parent. */
  get own() {
    return this.kept.length - this.inherited;
  }

  /**
   * Drops the last `n` tokens. If a dropped token was inherited, a copy of it is added to `items`.
   */
  takeBack(n) {
    const dropped = this.kept.splice(Math.max(0, this.kept.length - n), n);
    const own = new Set(this.items);
    for (const item of dropped) {
      if (own.has(item)) {
        item.taken = true;
        this.takenBack++;
      } else {
        const copy = Object.assign(Object.create(Item.prototype), item);
        this.items.push(Object.assign(copy, { taken: true, inherited: true }));
      }
    }
    this.run = "";
    this.inherited = Math.min(this.inherited, this.kept.length);
    this.splices.push({ from: this.kept.length + n, to: this.kept.length });
  }

  append(item) {
    this.run = item.appended ? this.run + item.text : "";
    this.items.push(item);
    this.kept.push(item);
  }

  /** Whether `run` is the text of all own tokens of this sequence, or of all except the last one. */
  hasWritten(run) {
    const own = this.kept.slice(this.inherited).map((item) => item.text);
    return [own, own.slice(0, -1)].some((texts) => texts.join("") === run);
  }
}

/** A generation. Times come from `performance.now()`, in milliseconds. */
export class Generation {
  sequences = new Map();
  logs = [];
  writes = [];
  /** Number of received tokens, including tokens that splices dropped. */
  received = 0;
  promptTokens = 0;
  cachedTokens = 0;
  firstAt = null;
  endedAt = null;
  fault = null;

  constructor(request, startedAt) {
    this.request = request;
    this.startedAt = startedAt;
    /** The model: `vocabSize`, and `vocabulary`, which is null until the texts have arrived. */
    this.model = { vocabSize: 0, vocabulary: null };
  }

  /** Whether all sequences ended with errors. */
  get failed() {
    return !this.running && [...this.sequences.values()].every((s) => s.error);
  }

  /** Number of tokens of all sequences, without tokens that splices dropped. */
  get tokens() {
    return [...this.sequences.values()].reduce((sum, s) => sum + s.own, 0);
  }

  /** Number of tokens that splices dropped. */
  get takenBack() {
    return [...this.sequences.values()].reduce((sum, s) => sum + s.takenBack, 0);
  }

  get running() {
    return this.endedAt === null;
  }

  /** The sequences in depth-first order: each sequence is followed by its forks. */
  get inOrder() {
    const all = [...this.sequences.values()];
    const below = (parent) =>
      all.filter((s) => s.parent === parent).flatMap((s) => [s, ...below(s)]);
    return below(null);
  }

  /** Adds an entry; returns its sequence. */
  add(entry, now) {
    // The first entry of a fork may arrive before the first entry of its parent.
    const parent = entry.parent == null ? null : this.#sequence(entry.parent, null, 0);
    const sequence = this.#sequence(entry.seq ?? 0, parent, entry.pos ?? 0);
    this.promptTokens = entry.prompt_tokens ?? this.promptTokens;
    this.cachedTokens = entry.cached_tokens ?? this.cachedTokens;
    if (entry.backtrack) sequence.takeBack(entry.backtrack);
    if (entry.token !== null) {
      this.firstAt ??= now;
      this.received++;
      sequence.append(new Item(entry));
    }
    this.#note(sequence, entry);
    if (entry.finish_reason) {
      sequence.finish = entry.finish_reason;
      sequence.error = entry.error ?? null;
      sequence.code = entry.code ?? null;
      sequence.constraint = entry.constraint ?? null;
      this.#markChosen(sequence);
      if (!entry.live) this.endedAt = now;
    }
    return sequence;
  }

  /** Ends the generation after a refusal or the loss of the connection. */
  fail(fault, now) {
    this.fault = fault;
    this.endedAt = now;
  }

  #sequence(seq, parent, from) {
    let sequence = this.sequences.get(seq);
    if (!sequence) {
      sequence = new Sequence(seq, parent, parent ? from : 0);
      this.sequences.set(seq, sequence);
    }
    return sequence;
  }

  /** Sets `chosenBy` of the sequence whose text a controller appended to the sequence `judge`. */
  #markChosen(judge) {
    if (!judge.run) return;
    const others = [...this.sequences.values()].filter((s) => s !== judge);
    const chosen = others.find((s) => s.hasWritten(judge.run));
    if (chosen) chosen.chosenBy = judge;
  }

  #note(sequence, entry) {
    const place = { seq: sequence.seq, pos: sequence.length, roundUs: entry.round_us ?? 0 };
    if (entry.logs) this.logs.push({ ...place, text: entry.logs });
    for (const command of entry.storage ?? []) {
      if (!command.WriteVar) continue;
      const { name, value, op } = command.WriteVar;
      const write = { ...place, name, op, value: fromHex(value) };
      this.writes.push(write);
      sequence.writes.push(write);
    }
  }
}

function fromHex(text) {
  return Uint8Array.from(text.match(/../g) ?? [], (pair) => Number.parseInt(pair, 16));
}
