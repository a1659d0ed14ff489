// Formats numbers, times and tokens for display.

const whole = new Intl.NumberFormat("en");

/** A whole number: 131,072. */
export const count = (n) => whole.format(n);

/** "1 token", "2 tokens". */
export const counted = (n, what) => `${count(n)} ${what}${n === 1 ? "" : "s"}`;

/** A share between 0 and 1: 63 %, 2.7 %, 0.02 %. */
export function percent(share) {
  const p = share * 100;
  if (p > 0 && p < 0.001) return "< 0.001\u00a0%";
  const digits = p >= 9.95 || p === 0 ? p.toFixed(0) : p >= 0.1 ? p.toFixed(1) : p.toPrecision(1);
  return `${digits}\u00a0%`;
}

/** Microseconds: 34 µs, 1.2 ms, 3.4 s. */
export function micros(us) {
  if (us < 1000) return `${Math.round(us)}\u00a0µs`;
  if (us < 1e6) return `${(us / 1000).toFixed(us < 10_000 ? 1 : 0)}\u00a0ms`;
  return `${(us / 1e6).toFixed(1)}\u00a0s`;
}

/** A duration: 4 s, 3 min, 2 h 10 min, 5 d. */
export function age(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 24 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d`;
}

/** Bytes: 92 B, 3.1 MB. */
export function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (n >= 1000 && unit < units.length - 1) ((n /= 1000), unit++);
  return `${unit && n < 10 ? n.toFixed(1) : Math.round(n)} ${units[unit]}`;
}

const SIGNS = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };

/** A token's text with signs for invisible characters: "↵␣␣␣␣". */
export function visible(text) {
  return text.replace(/[ \p{Cc}\p{Cf}\p{Zl}\p{Zp}\u00a0]/gu, (c) => {
    return SIGNS[c] ?? `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`;
  });
}
