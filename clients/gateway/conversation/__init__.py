"""Conversations and answers, which every interface translates to and from.

A conversation has turns, and a turn has parts. The chat template renders a conversation to a
prompt. An answer is a list of parts again, so that it can become a turn of the next request.
"""
