// Finds the text of token ids in the JSON of the tokenizers library, for alternatives that were not
// sampled. tokenbus.workers.controller.tokens.token_bytes is the complete implementation.

const SPACE = "▁";
const utf8 = new TextDecoder("utf-8", { fatal: true });
const encoder = new TextEncoder();

export class Vocabulary {
  #labels = new Map();

  /** `json`: a tokenizer in the format of the tokenizers library. */
  constructor(json) {
    const spec = JSON.parse(json);
    const vocab = spec.model?.vocab ?? {};
    const pieces = Array.isArray(vocab)
      ? vocab.map(([piece], id) => [piece, id])
      : Object.entries(vocab);
    const bytesOf = decoderOf(spec);
    for (const [piece, id] of pieces) this.#labels.set(id, labelOf(bytesOf(piece)));
    for (const added of spec.added_tokens ?? []) this.#labels.set(added.id, added.content);
  }

  /** The text of a token; bytes as `\xE2\x82` if they are not valid text; null for an unknown id. */
  label(id) {
    return this.#labels.get(id) ?? null;
  }
}

function labelOf(bytes) {
  try {
    return utf8.decode(bytes);
  } catch {
    return [...bytes].map((b) => `\\x${b.toString(16).toUpperCase().padStart(2, "0")}`).join("");
  }
}

function decoderOf(spec) {
  const steps = JSON.stringify([spec.decoder, spec.pre_tokenizer, spec.normalizer]);
  if (steps.includes('"ByteLevel"')) {
    const byteOf = byteCharacters();
    return (piece) => {
      const bytes = [...piece].map((c) => byteOf.get(c));
      return bytes.includes(undefined) ? encoder.encode(piece) : Uint8Array.from(bytes);
    };
  }
  const suffix = spec.model?.end_of_word_suffix;
  const prefix = spec.model?.type === "WordPiece" ? spec.model.continuing_subword_prefix : null;
  return (piece) => {
    const byte = /^<0x([0-9A-Fa-f]{2})>$/.exec(piece);
    if (byte) return Uint8Array.of(Number.parseInt(byte[1], 16));
    let text = piece.replaceAll(SPACE, " ");
    if (suffix) text = text.replace(suffix, " ");
    if (prefix) text = text.startsWith(prefix) ? text.slice(prefix.length) : ` ${text}`;
    return encoder.encode(text);
  };
}

/**
 * Maps each character of GPT-2's alphabet to its byte. A printable byte is represented by itself.
 */
function byteCharacters() {
  const prints = (b) => (b > 0x20 && b < 0x7f) || (b > 0xa0 && b < 0xad) || (b > 0xad && b < 0x100);
  let next = 0x100;
  const table = new Map();
  for (let b = 0; b < 256; b++) table.set(String.fromCharCode(prints(b) ? b : next++), b);
  return table;
}
