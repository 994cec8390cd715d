"""Anthropic's Python client: messages, streams, stop sequences, counted tokens, errors."""

import sys

import anthropic

url, _, chat_text = sys.argv[1:]
client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
messages = [{"role": "user", "content": [{"type": "text", "text": "def main():"}]}]
common = {"model": "tiny_llama", "max_tokens": 24, "messages": messages, "extra_body": {"temperature": 0}}

answer = client.messages.create(**common)
assert [block.text for block in answer.content] == [chat_text]
assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 24)
assert answer.usage.input_tokens == client.messages.count_tokens(model="tiny_llama", messages=messages).input_tokens

with client.messages.stream(**common) as stream:
    assert "".join(stream.text_stream) == chat_text
    assert stream.get_final_message().usage.output_tokens == 24

stop = chat_text[8:12]
answer = client.messages.create(**common, stop_sequences=[stop])
assert answer.content[0].text == chat_text.split(stop)[0]
assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)

for kind, changes in (("NotFoundError", {"model": "another"}), ("BadRequestError", {"max_tokens": 0})):
    try:
        client.messages.create(**{**common, **changes})
    except getattr(anthropic, kind):
        continue
    raise AssertionError(f"{kind} did not come")
