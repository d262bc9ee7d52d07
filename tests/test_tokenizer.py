"""The tokenizer agrees with transformers', from a folder and from a GGUF file's metadata."""

from __future__ import annotations

import inspect
import json
from unicodedata import category, ucd_3_2_0

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from mie.errors import CheckpointError, ModelNotFoundError, RequestError, UnsupportedModelError
from mie.text.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_metadata
from mie.text.token_bytes import byte_alphabet
from mie.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 2024, isn't it? We'll see 12345 foxes!",
    "def f(x):\n    return x ** 2  # a comment\n\n\nprint(f(10))\r\n\tend",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; naïve café, 東京タワー.",
]

# Text that is hard to cut: digits after spaces, line ends, marks, emoji, contractions.
HARD = [
    "  9",
    "\n  1. item",
    " ",
    "   ",
    "\n",
    "\r\n\n",
    "\t",
    "123456",
    "½²",
    "٣",
    "don't",
    "I'LL",
]
HARD += [
    "é",
    "e\u0301",
    "東京",
    "🙂",
    "👩\u200d👩\u200d👧",
    "\u00a0",
    "\ufffd",
    "naïve",
    "_x1",
    "!?",
]
PIECES = st.sampled_from(HARD)
TEXTS = st.lists(PIECES | st.text(max_size=6), max_size=8).map("".join)
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "<|im_end|", "<repo_name>"]
TEXTS_WITH_SPECIALS = st.lists(PIECES | st.sampled_from(SPECIALS), max_size=8).map("".join)


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_path):
    return Tokenizer.load(smollm2_path)


@pytest.fixture(scope="module")
def from_transformers(smollm2_path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_path)


@pytest.fixture(scope="module")
def from_gguf(smollm2_path):
    return Tokenizer.load(smollm2_path / "SmolLM2-135M-Instruct.Q4_1.gguf")


# -- the real model -----------------------------------------------------------------------------


@given(text=TEXTS | TEXTS_WITH_SPECIALS)
def test_encodes_and_decodes_as_transformers_does(smollm2_tokenizer, from_transformers, text):
    ids = smollm2_tokenizer.encode(text)
    assert ids == from_transformers.encode(text, add_special_tokens=False)
    assert smollm2_tokenizer.decode(ids) == from_transformers.decode(ids, skip_special_tokens=True)


@given(ids=st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=40))
def test_decodes_any_ids_as_transformers_does(smollm2_tokenizer, from_transformers, ids):
    assert smollm2_tokenizer.decode(ids) == from_transformers.decode(ids, skip_special_tokens=True)


@given(text=TEXTS | TEXTS_WITH_SPECIALS)
def test_gguf_metadata_and_folder_give_the_same_tokens(smollm2_tokenizer, from_gguf, text):
    assert from_gguf.encode(text) == smollm2_tokenizer.encode(text)


def test_gguf_metadata_and_folder_agree_on_everything_else(smollm2_tokenizer, from_gguf):
    messages = [{"role": "user", "content": "Hi"}]
    for name in ("eos_ids", "bos_id", "vocab_size", "strips_leading_space"):
        assert getattr(from_gguf, name) == getattr(smollm2_tokenizer, name)
    assert from_gguf.render_chat(messages) == smollm2_tokenizer.render_chat(messages)
    assert (smollm2_tokenizer.bos_id, smollm2_tokenizer.eos_ids) == (1, {2})


@given(text=TEXTS)
def test_a_text_comes_back_unchanged(smollm2_tokenizer, text):
    """Except for bytes that SmolLM2's vocabulary has no token for: its encoder drops them."""
    tokens = {smollm2_tokenizer.token(id) for id in range(smollm2_tokenizer.vocab_size)}
    dropped = bytes(byte for spelling, byte in byte_alphabet().items() if spelling not in tokens)
    expected = text.encode().translate(None, dropped).decode(errors="replace")
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text)) == expected


def test_digits_are_split_off_one_by_one_before_anything_merges(smollm2_tokenizer):
    tokens = [smollm2_tokenizer.token(id) for id in smollm2_tokenizer.encode("a  94")]
    assert tokens == ["a", "ĠĠ", "9", "4"]


def test_a_special_token_is_one_token_and_no_text(smollm2_tokenizer):
    assert smollm2_tokenizer.encode("<|im_end|>") == [2]
    assert smollm2_tokenizer.token_bytes(2) == b""
    assert smollm2_tokenizer.decode([2, 9690, 2]) == smollm2_tokenizer.decode([9690]) == "system"


def test_an_id_beyond_the_vocabulary_is_no_text(smollm2_tokenizer):
    assert smollm2_tokenizer.decode([smollm2_tokenizer.vocab_size + 5]) == ""


def test_a_lone_surrogate_is_refused_by_position(smollm2_tokenizer):
    with pytest.raises(RequestError, match=r"U\+D800 at 2"):
        smollm2_tokenizer.encode("ab\ud800")


# -- small tokenizers, trained here -------------------------------------------------------------


def train_byte_level(pre_tokenizer=None, vocab_size=450, special=("<bos>", "<eos>", "<eot>")):
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def as_gguf_metadata(backend, pre, **more):
    """What llama.cpp's converter writes for a byte-level tokenizer."""
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    special = {token.content for token in backend.get_added_tokens_decoder().values()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **more,
    }


SMALL = train_byte_level()


def from_metadata(metadata):
    return Tokenizer(*tokenizer_from_metadata(metadata))


def oracle_qwen2():
    from transformers import Qwen2Tokenizer

    model = json.loads(SMALL.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    return Qwen2Tokenizer(vocab=model["vocab"], merges=merges)


def oracle_llama3():
    """Llama 3's rule as transformers' own converter from tiktoken writes it."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    pattern = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    backend = tokenizers.Tokenizer.from_str(SMALL.to_str())
    model = json.loads(SMALL.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    backend.model = models.BPE(vocab=model["vocab"], merges=merges, ignore_merges=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


@given(text=TEXTS)
@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_each_rule_cuts_as_its_model_does(pre, text):
    oracle = {"qwen2": oracle_qwen2, "llama-bpe": oracle_llama3}[pre]()
    expected = oracle.encode(text, add_special_tokens=False)
    ids = expected if isinstance(expected, list) else expected.ids
    assert from_metadata(as_gguf_metadata(SMALL, pre)).encode(text) == ids


def smollm_words(text):
    """The rule in plain words: each digit is a word; GPT-2's rule cuts what lies between."""
    import regex

    gpt2 = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    words = []
    for part in regex.split(r"(\p{N})", text):
        words += gpt2.findall(part)
    return words


# The two regex engines know different Unicode versions: only what has been the same since 3.2.
SETTLED = [
    character
    for character in map(chr, range(0x20000))
    if ucd_3_2_0.category(character) == category(character) not in ("Cn", "Cs", "Co")
]


@given(text=st.lists(PIECES | st.sampled_from(SETTLED), max_size=12).map("".join))
def test_smollm_rule_equals_its_description(text):
    byte_of = byte_alphabet()
    backend = tokenizer_from_metadata(as_gguf_metadata(SMALL, "smollm"))[0]
    words = [
        bytes(byte_of[c] for c in word).decode()
        for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)
    ]
    assert words == smollm_words(text)


def test_the_byte_alphabet_spells_every_byte_once_and_as_the_library_does():
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())


def test_a_user_defined_token_is_whole_and_is_text():
    """Unlike a control token it is shown, and its characters are no spelling of bytes."""
    metadata = as_gguf_metadata(SMALL, "smollm")
    metadata["tokenizer.ggml.tokens"].append("<tool 東京>")
    metadata["tokenizer.ggml.token_type"].append(4)
    tokenizer = from_metadata(metadata)
    (first, *_, last) = ids = tokenizer.encode("a<tool 東京>b")
    assert len(ids) == 3 and tokenizer.decode([first, last]) == "ab"
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids) == "a<tool 東京>b"


def test_an_unknown_rule_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"'tekken'.*smollm"):
        from_metadata(as_gguf_metadata(SMALL, "tekken"))
    assert "tekken" not in PRE_TOKENIZERS


def test_another_vocabulary_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="'llama'"):
        from_metadata({"tokenizer.ggml.model": "llama"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.merges": ["a\u2603 b"]}, "broken"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "broken"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "broken"),
    ],
)
def test_metadata_that_contradicts_itself_is_a_checkpoint_error(change, said):
    with pytest.raises(CheckpointError, match=said):
        from_metadata(as_gguf_metadata(SMALL, "gpt-2") | change)


def test_missing_metadata_is_named():
    metadata = as_gguf_metadata(SMALL, "gpt-2")
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.merges"):
        from_metadata(metadata)


def test_gguf_answers_end_at_eos_and_at_end_of_turn():
    metadata = as_gguf_metadata(SMALL, "qwen2") | {"tokenizer.ggml.eot_token_id": 2}
    assert from_metadata(metadata).eos_ids == {1, 2}


def test_llama3_begins_a_prompt_with_one_bos_and_no_text_with_any():
    tokenizer = from_metadata(as_gguf_metadata(SMALL, "llama-bpe"))
    text = tokenizer.encode("The fox")
    assert 0 not in text
    assert tokenizer.encode_prompt("The fox") == [0, *text]
    assert tokenizer.encode_prompt("<bos>The fox") == [0, *text]


def test_llama3_takes_a_whole_word_that_its_merges_do_not_reach():
    metadata = as_gguf_metadata(SMALL, "llama-bpe")
    metadata["tokenizer.ggml.tokens"].append("Ġlazybones")
    metadata["tokenizer.ggml.token_type"].append(1)
    assert len(from_metadata(metadata).encode(" lazybones")) == 1
    assert len(from_metadata(metadata | {"tokenizer.ggml.pre": "gpt-2"}).encode(" lazybones")) > 1


def test_smollm_adds_nothing_to_a_prompt():
    tokenizer = from_metadata(as_gguf_metadata(SMALL, "smollm"))
    assert tokenizer.encode_prompt("The fox") == tokenizer.encode("The fox")


# -- folders ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    SMALL.save(str(tmp_path / "tokenizer.json"))

    def write(**files):
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return Tokenizer.load(tmp_path)

    write.path = tmp_path
    return write


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"tokenizer_config": {"eos_token": "<eos>"}}, {1}),
        ({"tokenizer_config": {"eos_token": {"content": "<eos>"}}}, {1}),
        ({"config": {"eos_token_id": 2}}, {2}),
        ({"config": {"eos_token_id": None}}, set()),
        ({"generation_config": {"eos_token_id": [1, 7]}}, {1, 7}),
        ({"config": {"eos_token_id": 0}, "generation_config": {"eos_token_id": [2]}}, {0, 2}),
        (
            {
                "tokenizer_config": {"eos_token": "<eos>"},
                "config": {"eos_token_id": [2, 5]},
                "generation_config": {"eos_token_id": 9},
            },
            {1, 2, 5, 9},
        ),
    ],
)
def test_an_answer_ends_at_any_eos_that_any_file_names(folder, files, expected):
    assert folder(**files).eos_ids == expected


def test_bos_comes_from_the_tokenizer_before_the_config(folder):
    assert folder().bos_id is None
    assert folder(config={"bos_token_id": 7}).bos_id == 7
    assert folder(tokenizer_config={"bos_token": "<bos>"}).bos_id == 0


def test_a_chat_template_is_found_wherever_a_folder_keeps_it(folder):
    messages = [{"role": "user", "content": "x"}]
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert folder(tokenizer_config={"chat_template": "S"}).render_chat(messages) == "S"
    assert folder(tokenizer_config={"chat_template": named}).render_chat(messages) == "D"
    (folder.path / "chat_template.jinja").write_text("J")
    assert folder().render_chat(messages) == "J"


def test_a_templated_bos_is_not_doubled(folder):
    """The post-processor would add one more; a chat must not pass through it."""
    backend = tokenizers.Tokenizer.from_str(SMALL.to_str())
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    template = "{{ bos_token }}{{ messages[0].content }}"
    settings = {"bos_token": "<bos>", "chat_template": template}
    ids = Tokenizer(backend, settings).encode_chat([{"role": "user", "content": "The fox"}])
    assert ids.count(0) == 1 and ids[0] == 0


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '"x"'])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_broken_file_is_named(folder, name, content):
    (folder.path / name).write_text(content)
    with pytest.raises(CheckpointError, match=name):
        folder()


def test_a_decoder_of_another_kind_is_refused_by_name(folder):
    backend = tokenizers.Tokenizer.from_str(SMALL.to_str())
    backend.decoder = decoders.WordPiece()
    backend.save(str(folder.path / "tokenizer.json"))
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        folder()
    content = json.loads(SMALL.to_str()) | {"decoder": None}
    (folder.path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedModelError, match="missing"):
        folder()


# -- SentencePiece-like tokenizers --------------------------------------------------------------


def piece_tokenizer(decoder):
    """Llama 2's shape: a space before the text, ``▁`` for spaces, bytes for what has no piece."""
    backend = train_pieces()
    backend.decoder = decoder
    return backend


def train_pieces():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    special = ["<unk>", "<s>", "</s>"]
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special + byte_pieces, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    content = json.loads(backend.to_str())
    content["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] in special]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


LLAMA2_DECODER = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
GEMMA_DECODER = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
)
PIECE_BACKENDS = {
    "llama2": piece_tokenizer(LLAMA2_DECODER),
    "gemma": piece_tokenizer(GEMMA_DECODER),
}


@given(text=TEXTS)
@pytest.mark.parametrize("name", PIECE_BACKENDS)
def test_pieces_decode_as_the_library_decodes_them(name, text):
    backend = PIECE_BACKENDS[name]
    ids = backend.encode(text, add_special_tokens=False).ids
    assert Tokenizer(backend, {}).decode(ids) == backend.decode(ids)
