"""The controller worker: it runs programs that decide, token by token, which text a model may
generate."""
