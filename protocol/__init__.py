"""LMTP on Tokenbus: messages, codecs, headers, errors, ids and settings, without sockets."""
