"""A model's vocabulary as controllers see it: the bytes of tokens, the trie, text to tokens."""
