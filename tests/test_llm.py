"""The model that talks, against transformers on the book's real model; and every refusal."""

from __future__ import annotations

import itertools

import pytest
import torch

from mie import LLM, SamplingParams
from mie.engine.paged import KVMemory, greedy_paged
from mie.engine.place import auto_dtype
from mie.engine.plain import greedy_with_cache, greedy_without_cache
from mie.errors import (
    ConfigError,
    ContextLengthError,
    EmptyPromptError,
    ModelNotFoundError,
    RequestError,
    UnknownPartError,
)
from mie.execution.contiguous_cache import ContiguousCache
from mie.memory.block_pool import BlockPool
from mie.memory.block_table import BlockTable
from mie.memory.prefix_cache import HashPrefixCache, NoPrefixCache
from mie.memory.radix_tree import RadixTree
from mie.ops import reference

QUESTIONS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List three red fruits.\n  1. Apple\n  2.",
    "Tell me a story about a robot who learns to paint. " * 8,
]


@pytest.fixture(scope="module")
def transformers_model(smollm2_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(smollm2_path)


@pytest.mark.parametrize("question", QUESTIONS, ids=range(len(QUESTIONS)))
def test_greedy_text_equals_transformers(smollm2, transformers_model, question):
    model, tokenizer = transformers_model
    messages = [{"role": "user", "content": question}]
    prompt = smollm2.chat_prompt(messages)
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert prompt == (theirs if isinstance(theirs, list) else list(theirs["input_ids"]))

    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
    expected = out[0, len(prompt) :].tolist()
    answer = smollm2.generate(prompt, max_tokens=40)
    assert answer.token_ids == expected
    assert answer.text == tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.finish_reason == ("length" if len(expected) == 40 else "stop")
    assert answer.num_prompt_tokens == len(prompt)


def test_paris(smollm2):
    prompt = smollm2.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
    assert "Paris" in smollm2.generate(prompt).text


def test_the_stream_is_the_answer_in_pieces(smollm2):
    prompt = smollm2.chat_prompt([{"role": "user", "content": "Say something in emoji 🐙 é ü"}])
    pieces = list(smollm2.stream(prompt, max_tokens=30))
    answer = smollm2.generate(prompt, max_tokens=30)
    assert "".join(piece.text for piece in pieces) == answer.text
    assert [piece.token_id for piece in pieces] == answer.token_ids
    reasons = [piece.finish_reason for piece in pieces]
    assert reasons[:-1] == [None] * (len(pieces) - 1)
    assert reasons[-1] == answer.finish_reason


def test_with_cache_equals_without(smollm2):
    prompt = smollm2.tokenizer.encode("Once upon a time, in a town by the sea,")
    cache = ContiguousCache.for_decoder(smollm2.decoder, 64)
    with_cache = list(itertools.islice(greedy_with_cache(smollm2.decoder, prompt, cache), 12))
    without = list(itertools.islice(greedy_without_cache(smollm2.decoder, prompt), 12))
    assert with_cache == without
    assert cache.length == len(prompt) + 11  # the last token chosen has not been computed


def test_paging_changes_no_token(smollm2):
    prompt = smollm2.tokenizer.encode("Once upon a time, in a town by the sea,")
    cache = ContiguousCache.for_decoder(smollm2.decoder, 64)
    expected = list(itertools.islice(greedy_with_cache(smollm2.decoder, prompt, cache), 24))
    memory = KVMemory(smollm2.decoder, num_blocks=12, block_size=4)
    for found in (0, (len(prompt) - 1) // 4 * 4):  # cold, then warm
        with memory.table(prompt) as table:
            assert table.num_tokens == found
            tokens = greedy_paged(smollm2.decoder, memory, table, prompt)
            assert list(itertools.islice(tokens, 24)) == expected
    memory.pool.check([])


def test_a_conversation_goes_on_in_the_same_cache(smollm2):
    """Feeding a text in two pieces is feeding it whole."""
    text = smollm2.tokenizer.encode("The quick brown fox jumps over the lazy dog. The quick brown")
    whole = ContiguousCache.for_decoder(smollm2.decoder, 64)
    pieces = ContiguousCache.for_decoder(smollm2.decoder, 64)
    next(greedy_with_cache(smollm2.decoder, text[:9], pieces))
    expected = list(itertools.islice(greedy_with_cache(smollm2.decoder, text, whole), 5))
    again = list(itertools.islice(greedy_with_cache(smollm2.decoder, text[9:], pieces), 5))
    assert again == expected


def test_the_loop_ends_when_the_cache_is_full(smollm2):
    cache = ContiguousCache.for_decoder(smollm2.decoder, 6)
    assert len(list(greedy_with_cache(smollm2.decoder, [504, 3575, 282], cache))) == 4


def test_bfloat16_logits_are_near(smollm2, smollm2_path):
    """Thirty layers of eleven roundings each (test_decoder.py counts them), the embedding and the
    head. A rounding errs evenly within half a unit in the last place, and the unit is at most 2⁻⁷
    of the value: 2⁻⁷ / √12 in root mean square."""
    from mie.model.kv_cache import NoCache

    rough = LLM(smollm2_path, dtype="bfloat16", device="cpu")
    tokens = torch.tensor(smollm2.tokenizer.encode("The capital of France is Paris, and the sea"))
    with torch.inference_mode():
        logits = [
            llm.decoder.logits(llm.decoder(tokens, torch.arange(len(tokens)), NoCache()))
            for llm in (smollm2, rough)
        ]
    error = (logits[0] - logits[1]).square().mean().sqrt() / logits[0].square().mean().sqrt()
    assert error < 2**-7 / 12**0.5 * (30 * 11 + 2) ** 0.5


def test_the_gguf_file_itself_talks_too(smollm2_path):
    llm = LLM(smollm2_path / "SmolLM2-135M-Instruct.Q4_1.gguf", dtype="float32", device="cpu")
    prompt = llm.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
    assert llm.generate(prompt, max_tokens=20).text == "The capital of France is Paris."


def test_the_engine_runs_on_the_readers_parts(smollm2, smollm2_path):
    """Each part replaced by one that counts: all are used, and the tokens stay the same."""
    from mie.model.safetensors import SafetensorsFile

    used = []

    def counting(name, part):
        def wrapper(*args):
            used.append(name)
            return part(*args)

        return wrapper

    parts = {name: counting(name, getattr(reference, name)) for name in
             ("rms_norm", "rope", "swiglu", "attention")}  # fmt: skip
    parts["safetensors_reader"] = counting("safetensors_reader", SafetensorsFile)
    mine = LLM(smollm2_path, dtype="float32", device="cpu", parts=parts)
    prompt = smollm2.tokenizer.encode("The capital of France is")
    assert (
        mine.generate(prompt, max_tokens=6).token_ids
        == smollm2.generate(prompt, max_tokens=6).token_ids
    )
    assert set(used) == set(parts)
    layers, steps = 30, 6
    assert used.count("rms_norm") == steps * (2 * layers + 1)
    assert used.count("rope") == steps * layers  # queries and keys are turned together
    assert used.count("swiglu") == used.count("attention") == steps * layers
    assert used.count("safetensors_reader") == 1


# -- memory -------------------------------------------------------------------------------------


AS_FAR_AS_IT_GOES = SamplingParams(max_tokens=None)


def with_memory(llm, num_blocks: int, block_size: int):
    """The same model with an engine and a K/V memory of its own."""
    return llm.with_settings(num_blocks=num_blocks, block_size=block_size)


def empty(llm) -> bool:
    """Nothing waits or runs, every block has come back, and the pool is whole."""
    llm.memory.check([])
    scheduler = llm.engine.core.scheduler
    return llm.memory.pool.num_used == len(scheduler.running) == len(scheduler.waiting) == 0


@pytest.fixture
def prompt(smollm2):
    return smollm2.chat_prompt([{"role": "user", "content": "Name a fruit."}])


@pytest.fixture
def eight(smollm2, prompt):
    """The first eight tokens of an answer that has more, each of which starts with a prompt."""
    tokens = smollm2.generate(prompt, max_tokens=8).token_ids
    assert len(tokens) == 8
    return tokens


def test_the_memory_is_four_contexts_by_default(smollm2):
    pool = smollm2.memory.pool
    assert (pool.num_blocks, pool.block_size) == (4 * 8192 // 16 + 1, 16)
    assert smollm2.max_context == 8192
    assert smollm2.memory.cache.nbytes == 2049 * 16 * 46080


def test_the_readers_memory_parts_are_used(smollm2_path, prompt, eight):
    class Pool(BlockPool):
        pass

    class Table(BlockTable):
        pass

    parts = {"block_pool": Pool, "block_table": Table, "prefix_cache": RadixTree}
    mine = LLM(smollm2_path, dtype="float32", device="cpu", num_blocks=9, block_size=7, parts=parts)
    memory = mine.memory
    assert type(memory.pool) is Pool and memory.pool.num_blocks == 9
    assert memory.cache.kv_L2NBGD.shape[2:4] == (9, 7)
    assert type(memory.prefix_cache) is RadixTree and type(memory.table(prompt)) is Table
    assert mine.generate(prompt, max_tokens=8).token_ids == eight
    assert mine.max_context == 57


def test_a_prompt_is_found_the_second_time(smollm2, prompt, eight):
    llm = with_memory(smollm2, 40, 4)
    cached = []
    for _ in range(2):
        answer = llm.generate(prompt, max_tokens=8)
        assert answer.token_ids == eight and empty(llm)
        cached.append(answer.num_cached_tokens)
    assert cached == [0, (len(prompt) - 1) // 4 * 4]
    hits = llm.memory.prefix_cache.hits
    assert (hits.queried, hits.hit) == (2 * len(prompt), cached[1])  # once a request


def test_the_next_turn_of_a_chat_finds_the_turns_before(smollm2):
    llm = with_memory(smollm2, 80, 4)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    first = llm.generate(llm.chat_prompt(turns), max_tokens=20)
    assert first.finish_reason == "stop"
    turns += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And that of Italy?"},
    ]
    prompt = llm.chat_prompt(turns)
    computed = first.num_prompt_tokens + len(first.token_ids) - 1
    assert prompt[:computed] == [*llm.chat_prompt(turns[:1]), *first.token_ids[:-1]]
    second = llm.generate(prompt, max_tokens=20)
    assert second.num_cached_tokens == computed // 4 * 4
    assert second.token_ids == smollm2.generate(prompt, max_tokens=20).token_ids


def test_an_answer_ends_where_the_memory_does(smollm2, prompt, eight):
    """Prompt and answer fill all blocks, and the limit is one for both."""
    blocks = -(-(len(prompt) + 4) // 4)
    llm = with_memory(smollm2, 1 + blocks, 4)
    room = blocks * 4 + 1 - len(prompt)  # the last token needs no K and V
    answer = llm.generate(prompt, AS_FAR_AS_IT_GOES)
    assert answer.token_ids == eight[:room] and answer.finish_reason == "kv_exhausted"
    assert empty(llm)
    *pieces, last = llm.stream(prompt)
    assert [piece.token_id for piece in pieces] == eight[:room]
    assert (last.token_id, last.finish_reason) == (None, "kv_exhausted")
    assert "".join(piece.text for piece in pieces) + last.text == answer.text
    with pytest.raises(ContextLengthError, match=rf"answer of 8 needs \d+ .* has {blocks}:"):
        llm.generate(prompt, max_tokens=8)
    assert llm.generate(prompt, max_tokens=room).finish_reason == "length"
    assert empty(llm)


def test_an_answer_ends_where_the_context_does(smollm2, prompt, eight):
    """More is cut, whether or not a number was asked for."""
    llm = smollm2.with_settings(num_blocks=40, max_model_len=len(prompt) + 5)
    assert llm.max_context == len(prompt) + 5
    for sampling in (AS_FAR_AS_IT_GOES, SamplingParams(max_tokens=100)):
        answer = llm.generate(prompt, sampling)
        assert (answer.token_ids, answer.finish_reason) == (eight[:5], "length")
    with pytest.raises(
        ContextLengthError, match=rf"has {len(prompt) + 5} tokens; .* {len(prompt) + 5}$"
    ):
        llm.stream([*prompt, *eight[:5]])


@pytest.mark.parametrize("length", [31, 32, 33, 40])
def test_a_prompt_that_the_memory_cannot_hold_is_refused_at_once(smollm2, length):
    llm = with_memory(smollm2, 9, 4)
    if length <= 32:
        assert len(llm.generate([5] * length, AS_FAR_AS_IT_GOES).token_ids) == 33 - length
    else:
        message = rf"of {length} tokens needs {-(-length // 4)} blocks of 4; .* has 8: .*num_blocks"
        with pytest.raises(ContextLengthError, match=message):
            llm.stream([5] * length)
    assert empty(llm)


def test_everything_is_back_when_the_last_piece_comes(smollm2, prompt):
    """Also for who never asks whether there is more, and who closes early, or never begins."""
    llm = with_memory(smollm2, 40, 4)
    for piece in (pieces := llm.stream(prompt, max_tokens=5)):
        if piece.finish_reason is not None:
            break
        assert llm.memory.pool.num_used > 0
    assert empty(llm)
    assert list(pieces) == []
    pieces = llm.stream(prompt, max_tokens=5)
    next(pieces)
    assert llm.memory.pool.num_used > 0
    pieces.close()
    assert empty(llm)
    llm.stream(prompt, max_tokens=5)
    assert empty(llm)


def test_an_error_in_a_step_leaves_nothing_behind(smollm2, prompt, eight, monkeypatch):
    llm = with_memory(smollm2, 40, 4)
    pieces = llm.stream(prompt, max_tokens=8)
    next(pieces)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine.runner, "sample", interrupted)
        next(pieces)
    assert empty(llm)
    assert list(pieces) == []
    assert llm.generate(prompt, max_tokens=8).token_ids == eight


def test_of_two_streams_that_lack_blocks_one_waits_and_both_finish(smollm2, prompt, eight):
    blocks = -(-len(prompt) // 4)
    llm = with_memory(smollm2, 1 + 2 * blocks + 1, 4)
    streams = llm.stream(prompt, max_tokens=8), llm.stream(prompt, max_tokens=8, salt="another")
    both = [list(pieces) for pieces in zip(*streams, strict=True)]
    for answer in zip(*both, strict=True):
        assert [piece.token_id for piece in answer] == eight
        assert answer[-1].finish_reason == "length"
    preempted = [name for record in llm.trace.records for name in record.preempted]
    assert len(preempted) >= 1 and len({*preempted}) == 1, "the one that came second"
    assert empty(llm)


@pytest.mark.parametrize("prefix_cache", [HashPrefixCache, RadixTree])
def test_prompts_of_another_salt_are_not_found(small_path, prefix_cache):
    """Else how soon an answer begins would tell one user what another one has asked."""
    parts = {"prefix_cache": prefix_cache}
    llm = LLM(small_path, device="cpu", num_blocks=40, block_size=4, parts=parts)
    text = "the same text for all"
    found = (len(text) - 1) // 4 * 4
    answers = []
    for salt, cached in [("a", 0), ("b", 0), ("", 0), ("a", found), ("b", found), ("", found)]:
        answer = llm.generate(text, max_tokens=6, salt=salt)
        pieces = list(llm.stream(text, max_tokens=6, salt=salt))
        assert (answer.num_prompt_tokens, answer.num_cached_tokens) == (len(text), cached)
        assert pieces[-1].num_cached_tokens == found, "the second time of this salt"
        assert [piece.token_id for piece in pieces] == answer.token_ids
        answers.append(answer.token_ids)
        assert empty(llm)
    assert answers == answers[:1] * 6
    longer = llm.tokenizer.encode_prompt(text) + answers[0]
    assert llm.generate(longer, max_tokens=1, salt="c").num_cached_tokens == 0
    assert llm.generate(longer, max_tokens=1, salt="a").num_cached_tokens > found, (
        "the answer is known too"
    )


def test_without_a_prefix_cache_nothing_is_found(small_path):
    llm = LLM(small_path, device="cpu", num_blocks=40, parts={"prefix_cache": NoPrefixCache})
    text = "the same text twice, longer than a block"
    assert [llm.generate(text, max_tokens=3).num_cached_tokens for _ in range(2)] == [0, 0]
    assert empty(llm)


# -- where it runs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "parameters", "expected"),
    [
        ("cpu", 134_515_008, torch.float32),
        ("cpu", 7_000_000_000, torch.float32),
        ("cuda", 134_515_008, torch.float32),
        ("cuda", 1_000_000_000, torch.bfloat16),
    ],
)
def test_only_large_models_on_a_gpu_are_rounded_unasked(device, parameters, expected):
    assert auto_dtype(torch.device(device), parameters) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_bfloat16_logits_are_not_rounded(smollm2_path):
    llm = LLM(smollm2_path, dtype="bfloat16", device="cuda")
    logits = llm.decoder.logits(torch.randn(1, 576, dtype=torch.bfloat16, device="cuda"))
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt(smollm2, prompt):
    with pytest.raises(EmptyPromptError):
        smollm2.stream(prompt)


def test_a_prompt_that_leaves_no_room_names_both_lengths(smollm2):
    with pytest.raises(ContextLengthError, match=r"has 8192 tokens; .* may have 8192$"):
        smollm2.stream([5] * 8192)


@pytest.mark.parametrize("token", [-1, 49152])
def test_a_token_outside_the_vocabulary(smollm2, token):
    with pytest.raises(RequestError, match=rf"token {token} .* 49152"):
        smollm2.stream([5, token])


@pytest.mark.parametrize("max_tokens", [0, -3])
def test_an_answer_of_no_tokens(smollm2, max_tokens):
    with pytest.raises(RequestError, match=str(max_tokens)):
        smollm2.stream("Hello", max_tokens=max_tokens)


def test_settings_are_refused_before_the_model_is_loaded():
    with pytest.raises(ConfigError, match="int3"):
        LLM(dtype="int3")
    for device in ("abacus", "mps", "meta", "cpu:3", "cuda:x", "cuda:-1", "cuda:99"):
        with pytest.raises(ConfigError, match=device):
            LLM(device=device)
    with pytest.raises(UnknownPartError, match=r"softmax.*rms_norm"):
        LLM(parts={"softmax": torch.softmax})
    with pytest.raises(UnknownPartError, match="prefix_cache is None; leave it out"):
        LLM(parts={"block_pool": BlockPool, "prefix_cache": None})
    with pytest.raises(ModelNotFoundError):
        LLM("./no-such-folder")


def test_a_part_that_counts_as_false_is_used_all_the_same():
    from mie import parts

    class Empty:
        def __len__(self):
            return 0

    mine = Empty()
    chosen = parts.choose({"rms_norm": mine})
    assert chosen["rms_norm"] is mine and chosen.keys() == parts.DEFAULTS.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device to grant")
def test_a_missing_device_is_named():
    with pytest.raises(ConfigError, match="cuda"):
        LLM(device="cuda")
