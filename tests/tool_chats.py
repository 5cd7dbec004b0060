"""In: nothing. Out: small chat templates in the shapes of those of models that call tools, and lines with tools.
Does not decide what is tested: the tests that import it do."""

from __future__ import annotations

from typing import Any

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA = """{{- bos_token }}
{%- macro head(role) %}{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{%- endmacro %}
{%- macro words(content) %}
    {%- if content is string %}{{- content | trim }}
    {%- else %}{%- for part in content %}{%- if part.type == 'text' %}{{- part.text | trim }}{%- endif %}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- set told = namespace(tools=false) %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at once') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- head('assistant') + '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson(indent=2) + '}<|eot_id|>' }}
    {%- elif message.role in ('tool', 'ipython') %}
        {{- head('ipython') }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- head(message.role) }}
        {%- if message.role == 'user' and tools and not told.tools %}
            {%- set told.tools = true %}
            {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
        {%- endif %}
        {{- words(message.content) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- head('assistant') }}{%- endif %}"""
MISTRAL = """{{- bos_token }}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == asked[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- call.function | tojson }}
            {%- if call.id is not defined %}{{- raise_exception('a call needs an id') }}{%- endif %}
            {{- ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('no such role') }}
    {%- endif %}
{%- endfor %}"""
HERMES = (
    "{{- '<|im_start|>system\\n<tools> ' }}{%- for tool in tools %}{{- tool.function | tojson(sort_keys=true) }}"
    "{%- endfor %}{{- ' </tools><|im_end|>\\n' }}" + QWEN.replace("if tools", "if false")
)
TAGGED = QWEN.replace(
    "{{- '<|im_end|>\\n' }}\n    {%- elif message.role == 'tool'",
    "{{- '<|im_end|>\\n' }}{%- endgeneration %}\n    {%- elif message.role == 'tool'",
).replace("{{- '<|im_start|>assistant' }}", "{{- '<|im_start|>assistant' }}{%- generation %}")
SHAPES = {"qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "hermes": HERMES, "tagged": TAGGED}

WEATHER = {
    "type": "function",
    "function": {
        "name": "wetter",
        "description": "Wetter in Zürich <b>&'",
        "parameters": {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": ["null", "number"]}}},
    },
}


def call(arguments: object, **more: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "wetter", "arguments": arguments}, **more}


ASK = {"role": "user", "content": "How is it in Zürich?"}
RESULT = {"role": "tool", "name": "wetter", "tool_call_id": "abcdefgh1", "content": '18 "°C"'}
ANSWER = {"role": "assistant", "content": "It is 18 °C."}
CALLS = {"role": "assistant", "content": None, "tool_calls": [call({"b": "Zürich", "a": None}, id="abcdefgh1")]}
LINES: dict[str, dict[str, Any]] = {
    "called": {"messages": [ASK, CALLS, RESULT, ANSWER], "tools": [WEATHER]},
    "words beside a call": {"messages": [ASK, {**CALLS, "content": "I look."}, RESULT, ANSWER], "tools": [WEATHER] * 2},
    "content missing": {
        "messages": [ASK, {"role": "assistant", "tool_calls": CALLS["tool_calls"]}],
        "tools": [WEATHER],
    },
    "content empty": {"messages": [ASK, {**CALLS, "content": ""}, RESULT, ANSWER], "tools": [WEATHER]},
    "arguments as text": {"messages": [ASK, {**CALLS, "tool_calls": [call('{"b": 1}', id="abcdefgh1")]}]},
    "two calls": {
        "messages": [ASK, {**CALLS, "tool_calls": CALLS["tool_calls"] * 2}, RESULT, RESULT, ANSWER],
        "tools": [WEATHER],
    },
    "no id": {"messages": [ASK, {**CALLS, "tool_calls": [call({})]}, RESULT, ANSWER], "tools": [WEATHER]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Say "}] * 2}, ANSWER]},
    "parts of the assistant": {"messages": [ASK, {"role": "assistant", "content": [{"type": "text", "text": "No."}]}]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, ASK, ANSWER], "tools": [WEATHER]},
    "keys without a value": {"messages": [{**ASK, "tool_calls": None}, {**ANSWER, "tool_calls": None}], "tools": None},
    "no tools": {"messages": [ASK, ANSWER], "tools": []},
    "a result as an object": {"messages": [ASK, CALLS, {**RESULT, "content": [{"type": "text", "text": "1"}]}, ANSWER]},
}
