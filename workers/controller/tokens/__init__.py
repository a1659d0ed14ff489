"""A model's vocabulary as controllers see it: token bytes, the token trie, and tokenization."""
