"""In: nothing. Out: chat templates of models that people tune, and a tokenizer with the control tokens of all of them.
Does not decide what is tested: the tests that import it do."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import tokenizers as library

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
DATED = """{{- bos_token }}
{%- set today = strftime_now("%d %b %Y") %}
{{- "<|im_start|>system\\nToday is " + today + ", " + (tools | tojson) + "<|im_end|>\\n" }}
{%- for message in messages %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == "assistant" %}
        {%- generation %}{{- message.content | trim + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "zephyr": ZEPHYR, "mistral": MISTRAL, "dated": DATED}
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "zephyr": "</s>", "mistral": "</s>", "dated": "<|im_end|>"}
"""What ends a turn of the assistant."""

CONTROLS = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|user|>", "<|system|>", "<|assistant|>"),
)
TALK = [
    {"role": "user", "content": "Hello you, how are  you?"},
    {"role": "assistant", "content": "Well é😀, and you?"},
    {"role": "user", "content": "The world is round."},
    {"role": "assistant", "content": "It is."},
]


@cache
def tokenizer_text() -> str:
    """A small byte-level BPE that puts <s> before every text that it is asked to, as a tokenizer.json."""
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=list(CONTROLS),
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([message["content"] for message in TALK] * 9 + [" a  b\n\nuser assistant"], trainer)
    inner.post_processor = library.processors.Sequence(
        [
            library.processors.ByteLevel(trim_offsets=True),
            library.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
        ]
    )
    return str(inner.to_str())


def write_model_folder(folder: Path, template: str) -> Path:
    """A folder with tokenizer.json and a tokenizer_config.json that has a template."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_text())
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
