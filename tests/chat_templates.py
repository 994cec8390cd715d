"""Chat templates that write calls of tools in the forms of model families, and a tokenizer of bytes that has them."""

import re

import numpy as np
from fake_runner import VOCABULARY, Bytes
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

TURN = "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
QWEN = """{%- if tools %}<|im_start|>system
{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}

# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0]['role'] == 'system' %}<|im_start|>system
{{ messages[0]['content'] }}<|im_end|>
{% endif %}{% for message in messages %}
{%- if message['role'] == 'assistant' %}<|im_start|>assistant
{% if message['reasoning_content'] %}<think>
{{ message['reasoning_content'] }}
</think>

{% endif %}{{ message['content'] }}
{%- for call in message['tool_calls'] %}
{%- if message['content'] or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>
{"name": "{{ call['function']['name'] }}", "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message['role'] == 'tool' %}<|im_start|>user
<tool_response>
{{ message['content'] }}
</tool_response><|im_end|>
{% elif message['role'] == 'user' %}<|im_start|>user
{{ message['content'] }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if opens %}<think>
{% endif %}{% endif %}"""
LLAMA3 = """{{ tools | tojson }}{% for message in messages %}<|head|>{{ message['role'] }}<|/head|>

{% if message['tool_calls'] %}{% if message['tool_calls'][1] %}{{ raise_exception('only one call') }}{% endif %}
{%- set call = message.tool_calls[0].function %}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else %}{{ message['content'] }}{% endif %}<|eot|>
{%- endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>

{% endif %}"""
MISTRAL = """<s>{% for message in messages %}
{%- if message['role'] == 'user' %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]
{%- endif %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }}[/INST]
{%- elif message['tool_calls'] %}[TOOL_CALLS] [
{%- for call in message['tool_calls'] %}{% if call.id | length != 9 %}{{ raise_exception('id') }}{% endif %}
{%- set written = call['function'] | tojson %}{{ written[:-1] }}, "id": "{{ call['id'] }}"}
{%- if not loop.last %}, {% endif %}{% endfor %}]</s>
{%- elif message['role'] == 'tool' %}[TOOL_RESULTS] {{ message['content'] }}[/TOOL_RESULTS]
{%- else %} {{ message['content'] }}</s>{% endif %}{% endfor %}"""
# As in the template of gpt-oss: thoughts before a call are dropped once a later answer has no call.
GPT_OSS = """<|start|>system<|message|>You help.<|end|>{% if tools %}<|start|>developer<|message|># Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>{% endif %}
{%- for message in messages %}{% set later = namespace(found=false) %}
{%- for one in messages[loop.index:] %}{% if one.role == 'assistant' and not one.tool_calls %}
{%- set later.found = true %}{% endif %}{% endfor %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception('content and thinking') }}{% endif %}
{%- if (message.content or message.thinking) and not later.found %}<|start|>assistant<|channel|>analysis<|message|>
{{- message.content or message.thinking }}<|end|>{% endif %}
{%- set call = message.tool_calls[0].function %}<|start|>assistant to=functions.{{ call.name }}
{{- '<|channel|>commentary json<|message|>' }}{{ call.arguments | tojson }}<|call|>
{%- elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif message.role == 'tool' %}<|start|>functions.tool to=assistant<|channel|>commentary<|message|>
{{- message.content | tojson }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
CHATML = "{% for message in messages %}" + TURN + "{% endfor %}{{ '<|im_start|>assistant\\n' }}"
SPECIAL = {
    "qwen": ["<|im_end|>", "<|im_start|>"],
    "llama3": ["<|eot|>", "<|head|>", "<|/head|>"],
    "mistral": ["</s>", "<s>", "[TOOL_CALLS]", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    "gpt_oss": ["<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"],
}
TEMPLATES = {"qwen": QWEN, "llama3": LLAMA3, "mistral": MISTRAL, "gpt_oss": GPT_OSS}
HEADERS = {"qwen": "<|im_start|>assistant\n", "llama3": "<|head|>assistant<|/head|>\n\n", "mistral": "[/INST]"}
GPT_OSS_TURN = re.compile(rb"\x02(?:user|functions)[^\x02]*\x02assistant")  # an answer has further `<|start|>`


class Templated(Bytes):
    """A tokenizer with one token per byte, and special tokens in place of control characters."""

    def __init__(self, family, template=None):
        self.byte_decoder = {chr(byte): byte for byte in range(256)}
        self.family, self.chat_template = family, template or TEMPLATES[family]
        special = SPECIAL[family]
        self.added_tokens_decoder = {number: AddedToken(text, special=True) for number, text in enumerate(special, 1)}
        self._jinja = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.BPE()), chat_template=self.chat_template
        )

    def __call__(self, text, **options):
        for token, added in self.added_tokens_decoder.items():
            text = text.replace(str(added), chr(token))
        return {"input_ids": [*text.encode()]}

    def convert_ids_to_tokens(self, token):
        return chr(token)

    def decode(self, ids, skip_special_tokens=True):
        text = bytes(token for token in ids if token).decode(errors="replace")
        for token, added in self.added_tokens_decoder.items():
            text = text.replace(chr(token), "" if skip_special_tokens else str(added))
        return text

    def apply_chat_template(self, messages, **options):
        return self._jinja.apply_chat_template(messages, **options)

    def answering(self, *answers):
        """Return a `next_token` of `FakeRunner`: the model wants to say these answers, one in each of its turns."""

        header, opened = (bytes(self(text)["input_ids"]) for text in (HEADERS.get(self.family, ""), "<think>\n"))
        turn = re.compile(re.escape(header)) if header else GPT_OSS_TURN

        def next_token(tokens):
            *earlier, said = turn.split(bytes(tokens))
            answer = bytes(self(answers[min(len(earlier), len(answers)) - 1])["input_ids"])
            if said.startswith(opened):
                said, answer = said.removeprefix(opened), answer.removeprefix(opened)
            logits = np.random.default_rng(len(tokens)).random(VOCABULARY).astype(np.float32)
            logits[answer[len(said)] if len(said) < len(answer) else 0] = 9.0
            return logits

        return next_token
