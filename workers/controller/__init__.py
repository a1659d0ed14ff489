"""The controller worker: programs that decide, token by token, what a model may say."""
