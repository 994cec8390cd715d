"""langchain-openai: chats whole, streamed, in batches and with log probabilities; completions."""

import sys

from langchain_openai import ChatOpenAI, OpenAI

url, text, chat_text = sys.argv[1:]
common = {"base_url": url, "api_key": "none", "model": "tiny_llama", "temperature": 0, "max_retries": 0}
chat = ChatOpenAI(max_completion_tokens=24, **common)

answer = chat.invoke("def main():")
assert answer.content == chat_text and answer.usage_metadata["output_tokens"] == 24
assert "".join(chunk.content for chunk in chat.stream("def main():")) == chat_text
assert [answer.content for answer in chat.batch(["def main():"] * 4)] == [chat_text] * 4
answer = chat.bind(logprobs=True, top_logprobs=2).invoke("def main():")
assert len(answer.response_metadata["logprobs"]["content"]) == 24

completion = OpenAI(max_tokens=24, **common)
assert completion.invoke("def main():") == text
assert "".join(completion.stream("def main():")) == text
