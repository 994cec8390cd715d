"""Models of transformers generate the same tokens over pages as with their own caches."""

import gc

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-models")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-models")

from families import (  # noqa: E402
    FAMILIES,
    LENGTHS,
    NEW_TOKENS,
    OTHERS,
    each,
    eager_tokens,
    padded,
    prompts,
    tiny_model,
)

from pagepool import SchedulerConfig  # noqa: E402
from pagepool.integrations.transformers import ModelRunner, release, use  # noqa: E402

GREEDY = {"do_sample": False, "pad_token_id": 0}
RECURRENT = {"Mamba2", "Bamba", "Qwen3Next", "Jamba", "FalconH1"}
WINDOWED = {"Mistral", "Gemma2", "Gemma3", "GptOss", "Cohere2"}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def in_use():
    """Return a function that makes models with pages. They are released after the test."""
    models = []

    def make(family, **options):
        model = tiny_model(family)
        runner = use(model, **{"num_blocks": 1024, **options})
        models.append(model)
        return model, runner

    yield make
    for model in models:
        release(model)


def greedy_batch(model, inputs, new_tokens=NEW_TOKENS):
    config = transformers.GenerationConfig(max_new_tokens=new_tokens, eos_token_id=-1, **GREEDY)
    return [output.generated_tokens for output in model.generate_batch(inputs, generation_config=config).values()]


def assert_nothing_is_left(runner, prefix_cache=None):
    """Check that only the prefix cache holds blocks, and that no slot is in use."""
    if runner.pool is not None:
        runner.pool.allocator.check()
        assert runner.pool.allocator.in_use == (0 if prefix_cache is None else prefix_cache.num_cached)
    if runner.states is not None:
        runner.states.check()
        assert runner.states.used_count == 0


@pytest.mark.parametrize("family", each(FAMILIES))
def test_generate_gives_the_tokens_of_eager_attention(family, in_use):
    model, runner = in_use(family, prefix_cache=False)
    ids, mask = padded(prompts())
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, **GREEDY)
    assert tokens[:, ids.shape[1] :].tolist() == eager_tokens(family)
    assert_nothing_is_left(runner)


@pytest.mark.parametrize("family", each(FAMILIES))
def test_generate_batch_gives_the_tokens_of_eager_attention(family, in_use):
    model, runner = in_use(family, prefix_cache=False)
    assert greedy_batch(model, prompts()) == eager_tokens(family)
    assert_nothing_is_left(runner)


@pytest.mark.parametrize("family", each(OTHERS))
def test_families_with_special_features_match_eager_attention(family, in_use):
    model, runner = in_use(family, prefix_cache=False)
    ids, mask = padded(prompts())
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, **GREEDY)
    assert tokens[:, ids.shape[1] :].tolist() == eager_tokens(family)
    assert greedy_batch(model, prompts()) == eager_tokens(family)
    assert_nothing_is_left(runner)


@pytest.mark.parametrize("family", each(FAMILIES))
def test_eager_tokens_vary(family):
    """Comparing tokens would prove little if a model repeated one token."""
    assert all(len(set(row)) > 5 for row in eager_tokens(family))


@pytest.mark.parametrize("family", each(FAMILIES))
def test_a_scheduler_may_cut_prompts_into_chunks_and_preempt(family):
    runner = ModelRunner(tiny_model(family), num_blocks=40 * len(LENGTHS), max_sequences=len(LENGTHS))
    cache = runner.new_prefix_cache()
    config = SchedulerConfig(max_batch_tokens=24, max_prefill_tokens=16, max_batch_sequences=len(LENGTHS))
    scheduler = runner.scheduler(config, cache)
    numbers = [scheduler.add_request(prompt, max_new_tokens=16) for prompt in prompts()]
    while scheduler.has_work:
        batch = scheduler.schedule()
        logits = runner.run(batch)
        assert logits.dtype == torch.float32
        assert logits.shape == (sum(batch.wants_token), runner.vocab_size)
        chosen = iter(logits.argmax(-1).tolist())
        scheduler.commit(batch, [next(chosen) if wants else None for wants in batch.wants_token])
        scheduler.check()
    outputs = {sequence.id: sequence.output_tokens for sequence in scheduler.drain_finished()}
    assert [outputs[number] for number in numbers] == [row[:16] for row in eager_tokens(family)]
    assert_nothing_is_left(runner, cache)
    runner.close()


@pytest.mark.parametrize("family", each(FAMILIES))
def test_beams_and_samples_are_those_of_transformers(family, in_use):
    ids, mask = padded(prompts((5, 17, 40)))
    beams = {"max_new_tokens": 20, "num_beams": 3, "num_return_sequences": 2, **GREEDY}
    samples = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.5, "top_k": 20, "num_return_sequences": 3}
    found = []
    model = tiny_model(family)
    runner = None
    for _ in range(2):
        torch.manual_seed(3)
        rows = model.generate(ids, attention_mask=mask, **beams)
        found.append((rows.tolist(), model.generate(ids, attention_mask=mask, pad_token_id=0, **samples).tolist()))
        if runner is None:
            runner = use(model, num_blocks=1024, prefix_cache=False)
    assert found[0] == found[1]
    assert_nothing_is_left(runner)
    release(model)


@pytest.mark.parametrize("family", each(sorted(set(FAMILIES) - RECURRENT)))
def test_assisted_decoding_gives_the_same_tokens(family, in_use):
    model, runner = in_use(family, prefix_cache=False)
    prompt = prompts((17,)) + prompts((70,))
    for ids in map(torch.tensor, ([row] for row in prompt)):
        plain = model.generate(ids, max_new_tokens=40, **GREEDY)
        looked_up = model.generate(ids, max_new_tokens=40, prompt_lookup_num_tokens=4, **GREEDY)
        assert looked_up.tolist() == plain.tolist()
        helped = model.generate(ids, max_new_tokens=40, assistant_model=tiny_model(family), **GREEDY)
        assert helped.tolist() == plain.tolist()
    assert_nothing_is_left(runner)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_a_model_in_use_drafts_for_another(family, in_use):
    helper, runner = in_use(family)
    model = tiny_model(family, num_hidden_layers=2)
    for prompt in prompts((17, 70)):
        ids = torch.tensor([prompt])
        plain = model.generate(ids, max_new_tokens=40, **GREEDY)
        assert model.generate(ids, max_new_tokens=40, assistant_model=helper, **GREEDY).tolist() == plain.tolist()
    gc.collect()
    assert runner.pool.allocator.in_use == 0
    runner.pool.allocator.check()


@pytest.mark.parametrize("family", each(sorted(RECURRENT)))
def test_recurrent_states_refuse_drafts(family, in_use):
    model, runner = in_use(family)
    with pytest.raises(ValueError, match=r"cropped|stateful"):
        model.generate(torch.tensor(prompts((17,))), max_new_tokens=9, prompt_lookup_num_tokens=4, **GREEDY)
    assert_nothing_is_left(runner)
