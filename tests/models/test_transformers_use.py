"""`use` and `release`: changes to a model, state shared between calls, refused models, restoration."""

import gc
import re
import threading
import weakref

import pytest
from refusals import refuses

torch = pytest.importorskip("torch", reason="torch is not installed: make test-models")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-models")

from families import SIZES, eager_tokens, padded, prompts, tiny_model  # noqa: E402
from transformers import DynamicCache, GenerationConfig  # noqa: E402

from pagepool import PoolExhausted, SchedulerConfig  # noqa: E402
from pagepool.integrations.transformers import ModelRunner, release, use  # noqa: E402
from pagepool.integrations.transformers.layout import Unsupported, window_of  # noqa: E402
from pagepool.integrations.transformers.paged_cache import PagedCache  # noqa: E402
from pagepool.integrations.transformers.step import stored_as  # noqa: E402
from pagepool.integrations.transformers.trial import try_out  # noqa: E402

GREEDY = {"do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def llama():
    model = tiny_model("Llama")
    yield model
    if "_pagepool_runner" in vars(model):
        release(model)


def count_fed(runner, call):
    """Return the result of `call` and the number of tokens that the model computes in it."""
    fed = []
    forward = runner.forward

    def counting(tokens, sequences, keep):
        fed.extend(map(len, tokens))
        return forward(tokens, sequences, keep)

    runner.forward = counting
    try:
        return call(), sum(fed)
    finally:
        del runner.forward


def batch_config(**changes):
    return GenerationConfig(**{"max_new_tokens": 8, "eos_token_id": -1, **GREEDY, **changes})


def test_a_second_call_computes_only_what_is_new(llama):
    runner = use(llama, num_blocks=64)
    prompt = prompts((70,))[0]
    first, fed = count_fed(runner, lambda: llama.generate(torch.tensor([prompt]), max_new_tokens=8, **GREEDY))
    assert fed == 70 + 7
    longer = torch.tensor([[*first[0].tolist(), 11, 12]])
    _, fed = count_fed(runner, lambda: llama.generate(longer, max_new_tokens=1, **GREEDY))
    assert fed == 80 - 64  # four blocks of 16 were cached
    outputs, fed = count_fed(runner, lambda: llama.generate_batch([prompt], batch_config()))
    assert outputs["req_0"].generated_tokens == first[0, 70:].tolist()
    assert fed == 70 - 64 + 7


def test_a_batch_with_a_failed_model_frees_its_blocks_and_caches_nothing(llama, monkeypatch):
    runner = use(llama, num_blocks=64)
    prompt = prompts((70,))[0]
    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", lambda *step: 1 / 0)
        with pytest.raises(ZeroDivisionError) as raised:
            llama.generate_batch([prompt], batch_config())
        assert raised.tb is not None and runner.pool.allocator.in_use == 0
    _, fed = count_fed(runner, lambda: llama.generate_batch([prompt], batch_config()))
    assert fed == 70 + 7


def test_rows_of_equal_tokens_are_computed_once(llama):
    runner = use(llama, num_blocks=64, prefix_cache=False)
    ids = torch.tensor(prompts((40,)))
    samples, fed = count_fed(
        runner, lambda: llama.generate(ids, max_new_tokens=2, num_return_sequences=4, do_sample=True, pad_token_id=0)
    )
    assert samples.shape == (4, 42)
    assert fed == 40 + 4
    assert runner.pool.allocator.in_use == 0


def test_a_prefix_cache_gives_way_when_the_pool_is_full(llama):
    runner = use(llama, num_blocks=9)
    for seed in range(4):
        (prompt,) = prompts((70,), seed)
        own = tiny_model("Llama").generate(torch.tensor([prompt]), max_new_tokens=8, **GREEDY)
        assert llama.generate(torch.tensor([prompt]), max_new_tokens=8, **GREEDY).tolist() == own.tolist()
    assert runner.pool.allocator.in_use <= 9


def test_a_pool_that_is_too_small_raises_and_loses_no_block(llama):
    runner = use(llama, num_blocks=4, prefix_cache=False)
    ids, mask = padded(prompts((30, 40)))
    with refuses(PoolExhausted, 3, 2, 4):
        llama.generate(ids, attention_mask=mask, max_new_tokens=8, **GREEDY)
    assert runner.pool.allocator.in_use == 0
    assert llama.generate(torch.tensor(prompts((17,))), max_new_tokens=8, **GREEDY).shape == (1, 25)
    outputs = llama.generate_batch(prompts((70, 17)), batch_config())
    assert outputs["req_0"].status.name == "FAILED"
    assert "blocks" in outputs["req_0"].error
    assert outputs["req_1"].is_finished() and len(outputs["req_1"].generated_tokens) == 8
    assert runner.pool.allocator.in_use == 0


def test_windows_give_their_blocks_back():
    model = tiny_model("Mistral")  # a window of 32 in every layer
    runner = use(model, num_blocks=64)
    config = SchedulerConfig(max_batch_tokens=32, max_prefill_tokens=32)
    scheduler = runner.scheduler(config)
    scheduler.add_request(prompts((400,))[0], max_new_tokens=40)
    most = 0
    while scheduler.has_work:
        batch = scheduler.schedule()
        most = max(most, runner.pool.allocator.in_use)
        scheduler.commit(batch, runner.run(batch).argmax(-1).tolist() or [None])
    assert most <= 6  # the window, the chunk and the blocks at both ends
    release(model)


def test_model_and_other_caches_are_as_before(llama):
    ids = torch.tensor(prompts((17,)))
    with torch.inference_mode():
        own = llama(ids).logits
        tokens = llama.generate(ids, max_new_tokens=8, **GREEDY)
        use(llama, num_blocks=16)
        assert torch.equal(llama(ids).logits, own)
        assert torch.equal(llama.generate(ids, max_new_tokens=8, use_cache=False, **GREEDY), tokens)
        cache = DynamicCache(config=llama.config)
        assert torch.equal(llama.generate(ids, max_new_tokens=8, cache=cache, **GREEDY), tokens)
        assert cache.get_seq_length() == 24
        assert torch.equal(llama.generate(ids, max_new_tokens=8, cache_implementation="static", **GREEDY), tokens)
    llama.train()
    llama(ids, labels=ids).loss.backward()
    assert llama.lm_head.weight.grad is not None


def test_release_puts_everything_back(llama):
    before = dict(vars(llama))
    implementation = llama.config._attn_implementation
    runner = use(llama, num_blocks=16)
    assert vars(llama).keys() != before.keys()
    with refuses(ValueError, "LlamaForCausalLM"):
        use(llama)
    release(llama)
    assert vars(llama).keys() == before.keys()
    assert llama.config._attn_implementation == implementation
    assert runner.pool is None
    with refuses(ValueError, "LlamaForCausalLM"):
        release(llama)
    ids = torch.tensor(prompts()[:1])
    assert llama.generate(ids, max_new_tokens=8, **GREEDY)[0, ids.shape[1] :].tolist() == eager_tokens("Llama")[0][:8]


def test_a_model_in_use_can_be_dropped():
    model = tiny_model("Llama")
    pool = weakref.ref(use(model, num_blocks=16).pool.allocator)
    del model
    gc.collect()
    assert pool() is None


def test_a_returned_cache_goes_on(llama):
    runner = use(llama, num_blocks=64, prefix_cache=False)
    ids, mask = padded(prompts((5, 17)))
    whole = llama.generate(ids, attention_mask=mask, max_new_tokens=12, **GREEDY)
    part = llama.generate(ids, attention_mask=mask, max_new_tokens=6, return_dict_in_generate=True, **GREEDY)
    longer = torch.cat((mask, torch.ones(2, 6, dtype=torch.long)), 1)
    rest, fed = count_fed(
        runner,
        lambda: llama.generate(part.sequences, attention_mask=longer, cache=part.cache, max_new_tokens=6, **GREEDY),
    )
    assert rest.tolist() == whole.tolist()
    assert fed == 2 * 6
    part.cache.close()
    assert runner.pool.allocator.in_use == 0


def test_prompts_may_be_read_in_chunks_by_generate(llama):
    use(llama, num_blocks=64)
    ids, mask = padded(prompts((5, 40)))
    whole = llama.generate(ids, attention_mask=mask, max_new_tokens=12, **GREEDY)
    cut = llama.generate(ids, attention_mask=mask, max_new_tokens=12, prefill_chunk_size=16, **GREEDY)
    assert cut.tolist() == whole.tolist()


def test_long_prompts_and_many_rows_have_room(llama):
    use(llama, num_blocks=200, max_sequences=2, prefix_cache=False)
    inputs = prompts((1100, 3, 40, 5, 17))
    ids, mask = padded(inputs)
    tokens = llama.generate(ids, attention_mask=mask, max_new_tokens=6, **GREEDY)[:, ids.shape[1] :].tolist()
    model = tiny_model("Llama")
    for prompt, row in zip(inputs, tokens, strict=True):
        assert model.generate(torch.tensor([prompt]), max_new_tokens=6, **GREEDY)[0, len(prompt) :].tolist() == row
    assert [
        output.generated_tokens for output in llama.generate_batch(inputs, batch_config(max_new_tokens=6)).values()
    ] == tokens


def test_states_have_no_more_rows_than_asked_for():
    model = tiny_model("Mamba2")
    runner = use(model, max_sequences=2)
    assert (runner.pool, runner.pools, runner.groups, runner.states.capacity) == (None, (), None, 2)
    ids, mask = padded(prompts((5, 9, 17)))
    with pytest.raises(PoolExhausted):
        model.generate(ids, attention_mask=mask, max_new_tokens=2, **GREEDY)
    assert runner.states.used_count == 0
    assert greedy(model, prompts((5, 9, 17)), 4) == [
        row[:4] for row in greedy(tiny_model("Mamba2"), prompts((5, 9, 17)), 4)
    ]
    release(model)


def greedy(model, inputs, new_tokens):
    """Return the tokens of each prompt: as a batch if the model uses pages, otherwise one by one."""
    if hasattr(model, "_pagepool_runner"):
        outputs = model.generate_batch(inputs, batch_config(max_new_tokens=new_tokens))
        return [output.generated_tokens for output in outputs.values()]
    rows = (model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, **GREEDY) for prompt in inputs)
    return [row[0, len(prompt) :].tolist() for prompt, row in zip(inputs, rows, strict=True)]


def test_a_model_that_computes_all_logits_runs_too():
    class All(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, use_cache=None, **others):
            return super().forward(input_ids, attention_mask, position_ids, cache, use_cache=use_cache)

    model = All(tiny_model("Llama").config).eval()
    model.load_state_dict(tiny_model("Llama").state_dict())
    use(model, num_blocks=128)
    assert greedy(model, prompts(), 8) == [row[:8] for row in eager_tokens("Llama")]
    ids, mask = padded(prompts())
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=8, **GREEDY)
    assert tokens[:, ids.shape[1] :].tolist() == [row[:8] for row in eager_tokens("Llama")]
    release(model)


def test_pages_have_as_many_bytes_as_asked_for(llama):
    runner = ModelRunner(llama, pool_bytes=1 << 20, dtype="float16")
    assert runner.pool.num_blocks == (1 << 20) // (
        4 * 2 * 2 * 16 * 16 * 2
    )  # layers, K and V, heads, dims, tokens, bytes
    runner.close()
    runner = ModelRunner(llama, max_sequences=4)
    assert runner.pool.num_blocks == 4 * 512 // 16
    runner.close()


@pytest.mark.parametrize("family", ["Llama", "Bamba"])
def test_a_forward_that_fails_leaves_nothing_behind(family):
    model = tiny_model(family)
    runner = use(model, num_blocks=128, prefix_cache=False)
    forward, calls = runner.forward, []

    def failing(*args):
        calls.append(1)
        if len(calls) % 4 == 0:
            raise RuntimeError("no more today")
        return forward(*args)

    runner.forward = failing
    ids, mask = padded(prompts((5, 17)))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no more today"):
            model.generate(ids, attention_mask=mask, max_new_tokens=8, **GREEDY)
        with pytest.raises(RuntimeError, match="no more today"):
            model.generate_batch(prompts((5, 17)), batch_config())
    gc.collect()
    assert runner.pool.allocator.in_use == 0
    assert runner.states is None or runner.states.used_count == 0
    release(model)


def test_a_plain_forward_during_one_over_pages_is_correct(llama):
    """The attention function is selected by the model's config, which all threads share."""
    runner = ModelRunner(llama, num_blocks=16)
    errors = []

    def plain():
        try:
            llama(torch.ones(1, 4, dtype=torch.long))
        except RuntimeError as error:
            errors.append(str(error))

    def beside(*args):
        thread = threading.Thread(target=plain)
        thread.start()
        thread.join()

    hook = llama.model.layers[0].register_forward_hook(beside)
    sequence = runner.new_sequence()
    sequence.append(3)
    runner.forward([[5, 6, 7]], [sequence], [1])
    hook.remove()
    assert errors == ["another thread runs this model over pages: one forward of a model at a time"]
    sequence.close()
    runner.close()


def test_two_models_and_two_threads_at_once():
    families = ("Llama", "Qwen3", "Llama", "Bamba")
    models = [tiny_model(family) for family in families]
    models[2] = models[0]  # two threads share this model
    for model in (models[0], models[1], models[3]):
        use(model, num_blocks=128)
    found = [None] * len(models)

    def generate(place):
        torch.set_num_threads(1)
        ids, mask = padded(prompts())
        tokens = models[place].generate(ids, attention_mask=mask, max_new_tokens=16, **GREEDY)
        found[place] = tokens[:, ids.shape[1] :].tolist()

    threads = [threading.Thread(target=generate, args=(place,)) for place in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[row[:16] for row in eager_tokens(family)] for family in families]
    for model in (models[0], models[1], models[3]):
        release(model)


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "DeepseekV3", "Bamba"])
@pytest.mark.parametrize(
    ("dtype", "pages"), [("bfloat16", None), ("float16", None), ("bfloat16", "float32"), ("float32", "int8")]
)
def test_other_dtypes_stay_close_to_the_model(family, dtype, pages):
    if pages == "int8" and family == "DeepseekV3":
        pages = "bfloat16"
    model = tiny_model(family).to(getattr(torch, dtype))
    (prompt,) = prompts((60,))
    with torch.inference_mode():
        own = model(torch.tensor([prompt])).logits[0, -1].float()
    runner = ModelRunner(model, num_blocks=64, dtype=pages)
    assert {pool.dtype for pool in runner.pools} == {pages or dtype}
    sequence = runner.new_sequence()
    sequence.append(60)
    logits = runner.forward([prompt], [sequence], [1])[0]
    assert (logits - own).abs().max() <= 0.15 * own.abs().max()
    sequence.close()
    runner.close()


REFUSED_CALLS = {
    "padding on the right": (
        {"attention_mask": [[1, 1, 1, 0]]},
        "attention_mask must have its zeros on the left: generation over pages needs left padding",
    ),
    "positions of its own": (
        {"position_ids": [[5, 6, 7, 8]]},
        "position_ids of row 0 are 5 to 8, and its tokens are numbers 0 to 3",
    ),
    "attention weights": (
        {"output_attentions": True, "return_dict_in_generate": True},
        "generation over pages gives logits, and neither attentions nor hidden states",
    ),
}


@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_a_call_that_pages_cannot_serve_is_refused(name, llama):
    options, message = REFUSED_CALLS[name]
    runner = use(llama, num_blocks=16)
    options = {key: torch.tensor(value) if isinstance(value, list) else value for key, value in options.items()}
    with pytest.raises(ValueError, match=message):
        llama.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=2, **options, **GREEDY)
    assert runner.pool.allocator.in_use == 0


def test_masks_and_batches_of_another_size_are_refused(llama):
    runner = use(llama, num_blocks=16)
    cache = PagedCache(runner)
    with refuses(ValueError, "attention_mask", "(1, 4)", "(1, 3)"):
        llama(torch.ones(1, 4, dtype=torch.long), attention_mask=torch.ones(1, 3), cache=cache)
    with refuses(ValueError, "generation", "pixel_values"):
        llama(torch.ones(1, 4, dtype=torch.long), pixel_values=torch.ones(1), images={"a": None}, cache=cache)
    llama(torch.ones(1, 4, dtype=torch.long), cache=cache)
    with refuses(ValueError, "input_ids", 2, 1):
        llama(torch.ones(2, 1, dtype=torch.long), cache=cache)
    with refuses(ValueError, "tokens_to_remove", 0, 3):
        cache.crop(3)
    assert (cache.get_seq_length(), cache.get_max_length()) == (4, -1)
    cache.batch_repeat_interleave(3)
    llama(torch.ones(3, 1, dtype=torch.long), cache=cache)
    cache.batch_select_indices(torch.tensor([2]))
    llama(torch.ones(1, 1, dtype=torch.long), cache=cache)
    cache.reset()
    assert (cache.get_seq_length(), runner.pool.allocator.in_use) == (0, 0)
    llama(torch.ones(2, 4, dtype=torch.long), cache=cache)
    cache.close()
    assert runner.pool.allocator.in_use == 0


def test_embeddings_are_refused(llama):
    use(llama, num_blocks=16)
    with refuses(ValueError, "generation", "input_ids", "inputs_embeds"):
        llama.generate(inputs_embeds=torch.zeros(1, 4, 64), max_new_tokens=2, **GREEDY)


def test_batches_choose_tokens_as_the_config_says(llama):
    use(llama, num_blocks=128)
    inputs = prompts((5, 17))
    greedy = [output.generated_tokens for output in llama.generate_batch(inputs, batch_config()).values()]
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        config = batch_config(do_sample=True, temperature=2.0, top_k=50, top_p=0.9)
        found.append([output.generated_tokens for output in llama.generate_batch(inputs, config).values()])
    assert found[0] == found[1] != found[2]
    torch.manual_seed(1)
    config = batch_config(do_sample=True, top_k=1)
    assert [output.generated_tokens for output in llama.generate_batch(inputs, config).values()] == greedy
    banned = batch_config(suppress_tokens=sorted({token for row in greedy for token in row}))
    for output in llama.generate_batch(inputs, banned).values():
        assert not {*output.generated_tokens} & {token for row in greedy for token in row}


def test_batches_end_at_stop_tokens_and_keep_the_order_of_prompts(llama):
    use(llama, num_blocks=128)
    inputs = prompts((5, 17))
    stop = eager_tokens("Llama")[0][2]
    outputs = llama.generate_batch(
        inputs, batch_config(eos_token_id=stop, do_sample=True, top_k=1, num_return_sequences=2), record_timestamps=True
    )
    assert list(outputs) == ["req_0", "req_0__child#0", "req_1", "req_1__child#0"]
    first = outputs["req_0"]
    assert first.generated_tokens == eager_tokens("Llama")[0][: eager_tokens("Llama")[0].index(stop) + 1]
    assert (first.prompt_ids, first.error, first.status.name) == (inputs[0], None, "FINISHED")
    assert len(first.timestamps) == len(first.generated_tokens) and first.timestamps == sorted(first.timestamps)
    assert first.created_time <= first.lifespan[0] <= first.timestamps[0] <= first.lifespan[1]
    assert llama.generate_batch([]) == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, ("generate_batch", "num_beams", 2)),
        ({"prompt_lookup_num_tokens": 3}, ("generate_batch", "prompt_lookup_num_tokens", 3)),
    ],
)
def test_batches_refuse_beams_and_drafts(options, words, llama):
    use(llama, num_blocks=16)
    with refuses(ValueError, *words):
        llama.generate_batch(prompts((5,)), batch_config(**options))


def test_batches_refuse_log_probabilities(llama):
    use(llama, num_blocks=16)
    config = transformers.ContinuousBatchingConfig(return_logprobs=True)
    with refuses(ValueError, "generate_batch"):
        llama.generate_batch(prompts((5,)), batch_config(), continuous_batching_config=config)
    budgets = transformers.ContinuousBatchingConfig(max_batch_tokens=16, max_requests_per_batch=2)
    outputs = llama.generate_batch(prompts((40, 5, 17)), batch_config(), continuous_batching_config=budgets)
    own = greedy(tiny_model("Llama"), prompts((40, 5, 17)), 8)
    assert [output.generated_tokens for output in outputs.values()] == own


def refuse(model, message, **options):
    before = dict(vars(model)) if isinstance(model, torch.nn.Module) else None
    with pytest.raises((ValueError, TypeError), match=message):
        use(model, **options)
    if before is not None:
        assert vars(model).keys() == before.keys()


def test_sizes_and_objects_that_are_wrong_are_refused(llama):
    refuse(object(), "model must be a PreTrainedModel of transformers, not object")
    refuse(llama, "give pool_bytes, 1024, or num_blocks, 7, not both", pool_bytes=1024, num_blocks=7)
    refuse(llama, "pool_bytes must be at least 16384, not 100|pool_bytes must be from 16384", pool_bytes=100)
    refuse(llama, "max_sequences must be at least 1, not 0|max_sequences must be from 1", max_sequences=0)
    refuse(llama, "dtype must be one of .*, not 'float64'", dtype="float64")
    refuse(llama, "dtype 'int4' needs channel scales", dtype="int4")
    refuse(
        llama.to(torch.float64), "LlamaForCausalLM cannot run over pages: its weights are torch.float64, not a dtype"
    )
    llama.float()
    refuse(tiny_model("Llama").train(), "LlamaForCausalLM cannot run over pages: it is in training mode.*eval")
    refuse(llama.model, "LlamaModel cannot run over pages: it has no head that generates tokens")
    with torch.device("meta"):
        away = transformers.LlamaForCausalLM(llama.config)
    refuse(away, "LlamaForCausalLM cannot run over pages: its weights are on meta, not the cpu")
    runner = ModelRunner(llama, num_blocks=8)
    scheduler = runner.scheduler(SchedulerConfig(lookahead=2))
    scheduler.add_request([5, 6], max_new_tokens=9)
    scheduler.commit(scheduler.schedule(), [7])
    with refuses(ValueError, 2, "drafts", "forward"):
        runner.run(scheduler.schedule())


T5 = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
OTHER_FAMILIES = {
    "T5ForConditionalGeneration": (T5, "it is an encoder-decoder"),
    "FalconForCausalLM": ({}, "layer 0 attends in code of its own, which calls no attention function"),
    "JetMoeForCausalLM": (
        {"kv_channels": 16, "num_key_value_heads": 2},
        "its logits over pages differ from its own by",
    ),
    "DogeForCausalLM": ({}, "DogeAttention makes its mask itself, and pages need to know its window"),
    "Llama4ForCausalLM": ({"attention_chunk_size": 16}, "its mask is not a causal window of 16: query"),
    # Its attention uses the number of tokens in the cache, which differs between the rows of a batch.
    "Llama4 without chunks": (
        {"layer_types": 4 * ["full_attention"], "no_rope_layers": 4 * [0], "num_local_experts": 2, "head_dim": 16},
        "its logits over pages differ from its own by",
    ),
    "MoshiForCausalLM": (
        {"sliding_window": 8, "ffn_dim": 96, "hidden_act": "silu"},
        "layer 0 sees all tokens, and its own cache keeps 8",
    ),
    # Positions from the length of the cache; positions after the padding index.
    "BartForCausalLM": (
        {"encoder_layers": 4, "decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 96},
        "it takes positions from the number of tokens in its cache, which differs from sequence to sequence",
    ),
    "RobertaForCausalLM": ({"is_decoder": True}, "its logits over pages differ from its own by"),
    "MiniMaxForCausalLM": ({"head_dim": 16}, "its forward raised ValueError: MiniMax uses cache of its own"),
    # Layers that run twice and store keys and values of the second run only.
    "DoryForCausalLM": (
        {"n_input_layers": 1, "n_output_layers": 1, "head_dim": 16, "recurrent_kv_cache_mode": "last_loop"},
        "DoryAttention attends to keys that it does not store in the cache",
    ),
    "RwkvForCausalLM": ({}, "it keeps nothing in the cache that it is given"),
    "DeepseekV32ForCausalLM": (
        {"q_lora_rank": 32, "kv_lora_rank": 32, "index_topk": 4, "index_head_dim": 16, "index_n_heads": 2},
        "its attention chooses tokens by an index",
    ),
}


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_a_model_that_pages_cannot_serve_is_refused_by_name(name):
    options, reason = OTHER_FAMILIES[name]
    name = "Llama4ForCausalLM" if name == "Llama4 without chunks" else name
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**{**({} if name.startswith("T5") else SIZES), **options})).eval()
    refuse(model, re.escape(f"{name} cannot run over pages: {reason}"))


def test_a_model_with_different_logits_over_pages_is_refused(llama):
    """Its logits are compared before it may run, so any difference is found."""
    attention = llama.model.layers[1].self_attn
    own = attention.forward

    def sharper(*args, **kwargs):
        out, weights = own(*args, **kwargs)
        return (out if llama.config._attn_implementation == "pagepool_probe" else 1.01 * out), weights

    attention.forward = sharper
    refuse(llama, "LlamaForCausalLM cannot run over pages: its logits over pages differ from its own by")
    attention.forward = lambda *args, **kwargs: 1 // 0
    refuse(llama, "LlamaForCausalLM cannot run over pages: its forward raised ZeroDivisionError")
    del attention.forward


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_support_for_chunks_in_recurrent_layers_is_detected(dtype):
    """In bfloat16 the rounding error is about as large as the error of a chunk that ignores the state."""
    for family, takes_chunks in (("Jamba", False), ("Bamba", True)):
        assert try_out(tiny_model(family).to(getattr(torch, dtype))).takes_chunks is takes_chunks


def test_head_dims_that_pages_do_not_have_are_refused():
    message = "LlamaForCausalLM cannot run over pages: pages do not hold its keys and values: head_dim must be"
    refuse(tiny_model("Llama", head_dim=12), message)


def test_masks_are_recognised_far_beyond_the_probe():
    def chunked(batch, head, query, key):
        return (key <= query) & (query // 40 == key // 40)

    def both_ways(batch, head, query, key):
        return key >= 0

    assert window_of(lambda batch, head, query, key: key <= query, None) is None
    assert window_of(lambda batch, head, query, key: (key <= query) & (query - key < 9), 9) == 8
    for mask, size in ((chunked, 40), (chunked, None), (both_ways, None), (both_ways, 8)):
        with refuses(Unsupported, "mask"):
            window_of(mask, size)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rotary_embeddings_that_depend_on_the_length_have_a_limit(kind):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    limit = 64
    model = tiny_model("Llama", rope_parameters=rope)
    runner = use(model, num_blocks=64)
    assert (runner.length_limit, runner.max_model_len) == (limit, limit)
    message = f"a sequence has 70 tokens, and beyond {limit} LlamaForCausalLM computes other keys"
    with pytest.raises(ValueError, match=message):
        model.generate(torch.tensor(prompts((70,))), max_new_tokens=2, **GREEDY)
    outputs = model.generate_batch(prompts((60, 20)), batch_config())
    assert outputs["req_0"].error == f"asked for 60 and 8 tokens, and the model takes {limit} over pages"
    assert len(outputs["req_1"].generated_tokens) == 8
    release(model)


def test_keys_of_any_strides_and_dtypes_are_stored(llama):
    runner = ModelRunner(llama, num_blocks=2, dtype="float16")
    turned = torch.arange(32.0).reshape(1, 16, 2).transpose(1, 2)  # (tokens, heads, dims)
    assert turned.stride(-1) != 1
    for rows in (turned, turned.half(), turned.bfloat16()):
        sequence = runner.new_sequence()
        runner.pool.append(0, sequence.append(1), *2 * [stored_as(runner.pool, rows)])
        assert torch.equal(torch.from_numpy(runner.pool.gather(0, sequence.blocks, 1)[0]), turned)
        sequence.close()
    runner.close()
