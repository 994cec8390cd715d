"""OpenAI's Python client: completions, chats, responses, streams, log probabilities, errors, an abandoned stream."""

import asyncio
import sys

import openai

url, text, chat_text = sys.argv[1:]
common = {"model": "tiny_llama", "max_tokens": 24, "temperature": 0}
messages = [{"role": "user", "content": "def main():"}]
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)

assert [model.id for model in client.models.list()] == ["tiny_llama"]

answer = client.completions.create(prompt="def main():", logprobs=2, **common)
logprobs = answer.choices[0].logprobs
assert answer.choices[0].text == "".join(logprobs.tokens) == text
assert answer.usage.completion_tokens == len(logprobs.token_logprobs) == 24
for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
    assert top[token] == logprob == max(top.values())

stream = client.completions.create(prompt="def main():", stream=True, stream_options={"include_usage": True}, **common)
chunks = list(stream)
assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == text
assert chunks[-1].usage.completion_tokens == 24 and chunks[-2].choices[0].finish_reason == "length"

answer = client.chat.completions.create(messages=messages, n=2, logprobs=True, top_logprobs=2, **common)
assert [choice.message.content for choice in answer.choices] == [chat_text, chat_text]
tokens = answer.choices[0].logprobs.content
assert b"".join(bytes(token.bytes) for token in tokens).decode() == chat_text

with client.chat.completions.stream(messages=messages, **common) as stream:
    assert "".join(event.delta for event in stream if event.type == "content.delta") == chat_text

response = client.responses.create(model="tiny_llama", input="def main():", max_output_tokens=24, temperature=0)
assert (response.output_text, response.status, response.usage.output_tokens) == (chat_text, "incomplete", 24)
with client.responses.stream(model="tiny_llama", input=messages, max_output_tokens=24, temperature=0) as stream:
    assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == chat_text

stopped = client.completions.create(prompt="def main():", stop=["self"], **common)
assert stopped.choices[0].text == text.split("self")[0] and stopped.choices[0].finish_reason == "stop"

drawn = [client.completions.create(prompt="def", **{**common, "temperature": 1}, seed=7, n=3) for _ in range(2)]
texts = [[choice.text for choice in answer.choices] for answer in drawn]
assert texts[0] == texts[1] and len(set(texts[0])) == 3

tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
answer = client.chat.completions.create(messages=messages, tools=tools, tool_choice="none", **common)
assert answer.choices[0].message.content == chat_text

answer = client.completions.create(
    prompt="def main():",
    frequency_penalty=2,
    presence_penalty=2,
    logit_bias={"9": -100},
    extra_body={"min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 24, "ignore_eos": True},
    **common,
)
assert answer.usage.completion_tokens == 24 and answer.choices[0].text != text

answer = client.completions.create(prompt="def main():", echo=True, logprobs=0, model="tiny_llama", max_tokens=0)
assert answer.choices[0].text == "def main():" and answer.choices[0].logprobs.token_logprobs[0] is None
assert answer.usage.completion_tokens == 0


def refusal(kind, call, **options):
    """Return the error of a call, which must be of this kind."""
    try:
        call(**{**common, **options})
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} did not come")


complete = client.completions.create
assert refusal(openai.NotFoundError, complete, prompt="x", model="another").code == "model_not_found"
assert refusal(openai.BadRequestError, complete, prompt="x " * 5000).code == "context_length_exceeded"
assert refusal(openai.BadRequestError, complete, prompt="x", max_tokens=5000).code == "context_length_exceeded"
assert refusal(openai.BadRequestError, complete, prompt="x", seed=-1).param == "seed"
assert refusal(openai.BadRequestError, complete, prompt="x", best_of=2).param == "best_of"
chat = client.chat.completions.create
assert "chat template" in refusal(openai.BadRequestError, chat, messages=messages, tools=tools).message


async def leave() -> None:
    """Abandon a stream after its first chunk; then another request gets its answer."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        async with await client.completions.create(prompt="x", stream=True, model="tiny_llama", max_tokens=900) as left:
            async for _ in left:
                break
        answer = await client.completions.create(prompt="def main():", **common)
        assert answer.choices[0].text == text


asyncio.run(leave())
