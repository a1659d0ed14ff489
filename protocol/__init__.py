"""The protocol (LMTP, with Tokenbus's extensions): messages, codecs, headers, errors, ids and
settings, without sockets."""
