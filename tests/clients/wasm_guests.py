"""Controllers in Wasm text for tests of clients. Each controller shows one behaviour."""

from __future__ import annotations

import wasmtime

GUEST = """(module
  (import "tokenbus" "log" (func $log (param i32 i32)))
  (import "tokenbus" "fail" (func $fail (param i32 i32)))
  (import "tokenbus" "seq_id" (func $seq (result i32)))
  (import "tokenbus" "var_set" (func $set (param i32 i32 i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (global $round (mut i32) (i32.const 0))
  (data (i32.const 1024) "\\01\\00\\00\\00\\00\\08\\00\\00\\00\\10\\00\\00")
  (data (i32.const 512) "round\\0a----bad luck")
  (data (i32.const 600) "\\41\\00\\00\\00\\42\\00\\00\\00")
  (func (export "tokenbus_abi_v1") (result i32) (i32.const 1024))
  (func (export "tokenbus_grow") (param i32) (result i32) (i32.const 0))
  (func (export "tokenbus_init_prompt") (result i32) (i32.const 1))
  (func (export "tokenbus_post_process") (result i32) (i32.const 1))
  (func (export "tokenbus_pre_process") (result i32)
    (global.set $round (i32.add (global.get $round) (i32.const 1)))
    %(pre)s (i32.const 1))
  (func (export "tokenbus_mid_process") (result i32) %(mid)s (i32.const 1)))"""


def guest(pre: str = "", mid: str = "") -> bytes:
    """A controller that allows all tokens unless code in ``pre`` or ``mid`` decides otherwise."""
    return bytes(wasmtime.wat2wasm(GUEST % {"pre": pre, "mid": mid}))


LOGS = guest(
    mid="""(call $log (i32.const 512) (i32.const 6))
    (drop (call $set (i32.const 512) (i32.const 5) (i32.const 516) (i32.const 2) (i32.const -1)
      (i32.const 0)))"""
)
FAILS = guest(
    mid="""(if (i32.eq (global.get $round) (i32.const 3))
      (then (call $fail (i32.const 522) (i32.const 8))))"""
)
FORKS = guest(
    # In round 4 the sequence forks. The second sequence drops 2 of 3 tokens and appends a and b.
    pre="""(if (i32.eq (global.get $round) (i32.const 4)) (then
      (i32.store (i32.const 1056) (i32.const 2)) (return (i32.const 3))))""",
    mid="""(if (i32.and (call $seq) (i32.eq (global.get $round) (i32.const 4))) (then
      (global.set $round (i32.const 5))
      (i32.store (i32.const 1056) (i32.const 2)) (i32.store (i32.const 1060) (i32.const 600))
      (i32.store (i32.const 1064) (i32.const 2)) (return (i32.const 4))))""",
)


SPLICES = guest(
    # In round 4, one splice drops the 3 tokens and appends two others.
    mid="""(if (i32.eq (global.get $round) (i32.const 4)) (then
      (i32.store (i32.const 1056) (i32.const 2)) (i32.store (i32.const 1060) (i32.const 600))
      (i32.store (i32.const 1064) (i32.const 3)) (return (i32.const 4))))"""
)


BIASED = guest(
    # The bias has one pair: 500 for token 65.
    mid="""(i32.store (i32.const 700) (i32.const 65)) (f32.store (i32.const 704) (f32.const 500))
    (i32.store (i32.const 1080) (i32.const 700)) (i32.store (i32.const 1084) (i32.const 1))"""
)


def endless(after: int) -> bytes:
    """A controller that drops two tokens and appends one in every second round from round ``after``
    on. The sequence stays at about ``after`` tokens and never reaches ``max_tokens``, so that the
    stream still runs when a slow client acts."""
    return guest(
        mid=f"""(if (i32.and (i32.ge_u (global.get $round) (i32.const {after}))
            (i32.and (global.get $round) (i32.const 1))) (then
          (i32.store (i32.const 1056) (i32.const 1)) (i32.store (i32.const 1060) (i32.const 600))
          (i32.store (i32.const 1064) (i32.const 2)) (return (i32.const 4))))"""
    )
