"""The chat template for models that do not have one.

The template writes the messages in order, as ``User: …`` and ``Assistant: …``. If the request has
tools, the text begins with the tools and the form of a call.
"""

PLAIN_TEMPLATE = """\
{%- if tools %}
System: These functions can be called:
{% for tool in tools %}
{{ tool.function | tojson }}
{% endfor %}
To call one, write:
<tool_call>
{"name": "its name", "arguments": {"its": "arguments"}}
</tool_call>
{% endif %}
{%- for message in messages %}
{{- (message.role | capitalize if message.role != 'developer' else 'System') + ':' }}
{%- if message.content %}{{ ' ' + message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' }}
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}
"""
