/**
 * Decodes MessagePack. This package has its own decoder, so that a web page can import the package
 * without a bundler and without other packages.
 *
 * Bytes become a `Uint8Array` that shares the message's memory, and integers of 64 bits become
 * numbers. Extension types are refused. Source: the specification of MessagePack.
 */

/**
 * Decodes the consecutive values in `bytes`. Throws RangeError if a value is not valid, and TypeError
 * if a text is not valid UTF-8.
 */
export function unpackAll(bytes: Uint8Array): unknown[] {
  const reader = new Reader(bytes);
  const values: unknown[] = [];
  while (!reader.done) values.push(reader.value());
  return values;
}

/** Maximum nesting of maps and lists. */
const DEEPEST = 200;
/**
 * Up to this number of bytes, a text is read byte by byte, because this is faster than TextDecoder.
 */
const SHORT = 24;

const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
/** A cache of field names by a hash of their bytes. Messages have only a few different names. */
const names: ({ readonly bytes: Uint8Array; readonly text: string } | undefined)[] = Array(256);

class Reader {
  readonly #view: DataView;
  #at = 0;
  #depth = 0;

  constructor(readonly bytes: Uint8Array) {
    this.#view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  }

  get done(): boolean {
    return this.#at >= this.bytes.length;
  }

  value(): unknown {
    const view = this.#view;
    const first = view.getUint8(this.#at++);
    if (first < 0x80) return first;
    if (first < 0x90) return this.#map(first & 0x0f);
    if (first < 0xa0) return this.#list(first & 0x0f);
    if (first < 0xc0) return this.#text(first & 0x1f);
    if (first >= 0xe0) return first - 0x100;
    switch (first) {
      case 0xc0:
        return null;
      case 0xc2:
        return false;
      case 0xc3:
        return true;
      case 0xc4:
        return this.#slice(this.#unsigned(1));
      case 0xc5:
        return this.#slice(this.#unsigned(2));
      case 0xc6:
        return this.#slice(this.#unsigned(4));
      case 0xca:
        return view.getFloat32(this.#skip(4));
      case 0xcb:
        return view.getFloat64(this.#skip(8));
      case 0xcc:
        return this.#unsigned(1);
      case 0xcd:
        return this.#unsigned(2);
      case 0xce:
        return this.#unsigned(4);
      case 0xcf:
        return Number(view.getBigUint64(this.#skip(8)));
      case 0xd0:
        return view.getInt8(this.#skip(1));
      case 0xd1:
        return view.getInt16(this.#skip(2));
      case 0xd2:
        return view.getInt32(this.#skip(4));
      case 0xd3:
        return Number(view.getBigInt64(this.#skip(8)));
      case 0xd9:
        return this.#text(this.#unsigned(1));
      case 0xda:
        return this.#text(this.#unsigned(2));
      case 0xdb:
        return this.#text(this.#unsigned(4));
      case 0xdc:
        return this.#list(this.#unsigned(2));
      case 0xdd:
        return this.#list(this.#unsigned(4));
      case 0xde:
        return this.#map(this.#unsigned(2));
      case 0xdf:
        return this.#map(this.#unsigned(4));
    }
    throw new RangeError(`the byte ${first} does not begin a supported value of MessagePack`);
  }

  /** Skips `size` bytes; returns the offset of the first of them. */
  #skip(size: number): number {
    const at = this.#at;
    this.#at += size;
    return at;
  }

  #unsigned(size: 1 | 2 | 4): number {
    const at = this.#skip(size);
    if (size === 1) return this.#view.getUint8(at);
    return size === 2 ? this.#view.getUint16(at) : this.#view.getUint32(at);
  }

  #slice(size: number): Uint8Array {
    const at = this.#skip(size);
    if (this.#at > this.bytes.length) throw new RangeError("the message ends inside a value");
    return this.bytes.subarray(at, this.#at);
  }

  #list(size: number): unknown[] {
    this.#enter();
    const list: unknown[] = [];
    for (let index = 0; index < size; index += 1) list.push(this.value());
    this.#depth -= 1;
    return list;
  }

  #map(size: number): object {
    this.#enter();
    const map: Record<string, unknown> = {};
    for (let index = 0; index < size; index += 1) {
      const first = this.#view.getUint8(this.#at);
      const name =
        first >= 0xa0 && first < 0xc0 ? this.#name(first & 0x1f) : String(this.value());
      const value = this.value();
      if (name !== "__proto__") map[name] = value;
      else Object.defineProperty(map, name, { value, enumerable: true });
    }
    this.#depth -= 1;
    return map;
  }

  #enter(): void {
    this.#depth += 1;
    if (this.#depth > DEEPEST) throw new RangeError("the message is nested too deeply");
  }

  #name(size: number): string {
    const at = this.#skip(1) + 1;
    const found = this.#slice(size);
    const slot = (31 * size + 7 * (found[0] ?? 0) + (found[size - 1] ?? 0)) & 0xff;
    const known = names[slot];
    if (known?.bytes.length === size) {
      let same = 0;
      while (same < size && known.bytes[same] === this.bytes[at + same]) same += 1;
      if (same === size) return known.text;
    }
    const text = utf8.decode(found);
    names[slot] = { bytes: new Uint8Array(found), text };
    return text;
  }

  #text(size: number): string {
    const bytes = this.#slice(size);
    if (size > SHORT) return utf8.decode(bytes);
    let text = "";
    for (const byte of bytes) {
      if (byte > 0x7f) return utf8.decode(bytes);
      text += String.fromCharCode(byte);
    }
    return text;
  }
}
