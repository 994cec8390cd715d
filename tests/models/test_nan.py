"""A model that returns NaN or infinity once: later requests find no page and no state of the failed step."""

import pytest

for name in ("torch", "transformers"):
    pytest.importorskip(name, reason=f"{name} is not installed: make test-models")

import torch  # noqa: E402
from families import each, prompts, tiny_model  # noqa: E402

from pagepool import Engine, SamplingParams, SchedulerConfig  # noqa: E402
from pagepool.integrations.transformers import release, use  # noqa: E402

SECONDS = 60
CONFIG = SchedulerConfig(max_sequences=4, max_prefill_tokens=32)  # prompts of 130 tokens take several steps
GREEDY = {"do_sample": False, "eos_token_id": None}


class Fault:
    """Makes the embedding of one token NaN or infinite in one forward of a model."""

    def __init__(self, model, value=float("nan")):
        self.value, self.forwards = value, -1  # how many forwards are right before
        model.get_input_embeddings().register_forward_hook(self.hook)

    def hook(self, module, arguments, output):
        self.forwards -= 1
        if self.forwards == -1:
            output = output.clone()
            output.view(-1, output.shape[-1])[0] = self.value
        return output


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("family", each(["Llama", "Mistral", "Gemma3", "Mamba2", "Bamba"]))
def test_a_prompt_is_right_after_any_of_its_steps_has_failed(family, value):
    model, (prompt,) = tiny_model(family), prompts((130,))
    with Engine(model, num_blocks=256, config=CONFIG) as engine:
        fault = Fault(model, value)
        wanted = engine.submit(prompt, SamplingParams(4), cache_salt="first").result(SECONDS).token_ids
        for step in (0, 2, 4, 6):  # chunks of the prompt, and a token
            fault.forwards = step
            failed = engine.submit(prompt, SamplingParams(4), cache_salt=step)
            with pytest.raises(RuntimeError, match="the model has failed"):
                list(failed)
            assert failed.finish_reason == "error" and fault.forwards < 0
            for _ in range(2):
                again = engine.submit(prompt, SamplingParams(4), cache_salt=step).result(SECONDS)
                assert again.token_ids == wanted
            assert again.num_cached >= 96, "the second request reads what the first one has computed"
            engine.check()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_pages_with_nan_are_forgotten_by_the_request_that_reads_them(dtype, tmp_path):
    """They are in memory and in the store, from a version that did not look, or from a bad memory cell."""
    options = {"num_blocks": 64, "dtype": dtype, "store": tmp_path, "store_bytes": 64 << 20, "config": CONFIG}
    (prompt,) = prompts((130,))
    wrong = [*prompt[:100], 7]
    with Engine(tiny_model("Llama"), **options) as engine:
        wanted = engine.submit(prompt, SamplingParams(4)).result(SECONDS).token_ids
        for block in engine.prefix_cache.references():
            engine.runner.pool.page(block).view("u1")[:] = 0xFF  # NaN in every dtype
    for number in range(3):
        with Engine(tiny_model("Llama"), **options) as engine:
            first, second = (engine.submit(tokens, SamplingParams(4)) for tokens in (prompt, wrong))
            for generation in (first, second):
                if number == 0:
                    with pytest.raises(RuntimeError, match="the model has failed"):
                        list(generation)
            found = engine.submit(prompt, SamplingParams(4)).result(SECONDS)
            assert found.token_ids == wanted and found.num_cached == (0 if number == 0 else 128)
            engine.check()


def test_generate_and_generate_batch_cache_nothing_of_a_row_with_nan():
    model, (prompt,) = tiny_model("Llama"), prompts((130,))
    ids = torch.tensor([prompt])
    wanted = model.generate(ids, max_new_tokens=4, **GREEDY)[0, 130:].tolist()
    fault = Fault(model)
    use(model, num_blocks=64)
    for step in (0, 2):
        fault.forwards = step
        model.generate(ids, max_new_tokens=4, **GREEDY)
        assert fault.forwards < 0
        assert model.generate(ids, max_new_tokens=4, **GREEDY)[0, 130:].tolist() == wanted
    config = model.generation_config
    config.do_sample, config.max_new_tokens = False, 4
    batching = type("Batching", (), {"max_batch_tokens": 64, "max_requests_per_batch": 2})
    for step in (0, 2, 3):
        fault.forwards = step
        other = [step + 3, *prompt]
        outputs = model.generate_batch([other], config, batching).values()
        assert [bool(output.error) for output in outputs] == [True]
        for _ in range(2):
            (output,) = model.generate_batch([prompt], config, batching).values()
            assert output.generated_tokens == wanted and not output.error
        (output,) = model.generate_batch([other], config, batching).values()
        assert not output.error and len(output.generated_tokens) == 4
    release(model)
