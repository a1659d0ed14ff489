"""The common form of conversations and answers. Each HTTP interface translates between this form
and its own form.

A conversation has turns, and a turn has parts. The chat template renders a conversation to a
prompt. An answer is a list of parts too, so that it can become a turn of the next request.
"""
