"""A model's vocabulary for controllers: token bytes, the token trie, and tokenization."""
