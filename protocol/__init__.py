"""LMTP on Tokenbus: messages, codecs, headers, errors and ids. Sans-IO: no sockets, no clocks."""
