"""Scripts that clients upload: their text runs in an interpreter that is a Wasm guest."""
