"""litellm: completions and chats, whole, streamed and asynchronous; its names for errors."""

import asyncio
import sys

import litellm

url, text, chat_text = sys.argv[1:]
chat = {"model": "hosted_vllm/tiny_llama", "messages": [{"role": "user", "content": "def main():"}]}
common = {"api_base": url, "api_key": "none", "max_tokens": 24, "temperature": 0, "num_retries": 0}

answer = litellm.completion(**chat, **common)
assert answer.choices[0].message.content == chat_text and answer.usage.completion_tokens == 24

chunks = list(litellm.completion(stream=True, **chat, **common))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat_text

answer = litellm.text_completion(model="text-completion-openai/tiny_llama", prompt="def main():", **common)
assert answer.choices[0].text == text

answer = asyncio.run(litellm.acompletion(**chat, **common, presence_penalty=0, frequency_penalty=0, n=1))
assert answer.choices[0].message.content == chat_text

too_long = [{"role": "user", "content": "x " * 5000}]
try:
    litellm.completion(**{**chat, "messages": too_long}, **common)
except litellm.ContextWindowExceededError as error:
    assert error.status_code == 400
else:
    raise AssertionError("a prompt that is too long was accepted")
