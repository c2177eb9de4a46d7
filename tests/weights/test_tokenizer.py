"""Tokenizers: ids against independent references, BOS and offsets, and damaged files."""

import itertools
import json
import pathlib
import re
import unicodedata

import numpy as np
import pytest
import tokenizers

from purelora.core import errors
from purelora.formats import gguf_file
from purelora.interop import builtin
from purelora.interop.gguf import tokenizer_read
from purelora.weights import hf_tokenizer, tokenizer
from tests.support import model_files

ORACLES = pathlib.Path(__file__).parents[1] / "oracles"
SMOLLM2 = json.loads((ORACLES / "smollm2_135m.json").read_text(encoding="utf-8"))
TEXTS = (
    "",
    "a",
    "the theme, the other",
    "naïve café — 你好 👩‍🚀 e\u0301",
    " \n\t two  spaces\r\n",
    "<|im_start|>user\nhé<|im_end|>\n",
    "1234567 ½ ١٢",
)


def ids(made: tokenizer.Tokenizer, text: str, *, add: bool = False) -> list[int]:
    return made.encode(text, add_special_tokens=add).ids.tolist()


# ---- Hugging Face folders ----------------------------------------------------------------------


def bos_template() -> tokenizers.processors.TemplateProcessing:
    return tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 257)]
    )


@pytest.fixture
def folder(tmp_path):
    """A folder whose tokenizer.json adds a BOS, trims offsets, cuts and pads."""
    backend = tokenizers.Tokenizer.from_str(builtin.tiny().tokenizer.backend.to_str())
    backend.post_processor = tokenizers.processors.Sequence(
        [tokenizers.processors.ByteLevel(trim_offsets=True), bos_template()]
    )
    backend.enable_truncation(8)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    model_files.write_json(tmp_path / "tokenizer_config.json", settings)
    return tmp_path


def change(file, **entries) -> None:
    data = json.loads(file.read_text()) if file.exists() else {}
    model_files.write_json(file, data | entries)


@pytest.mark.parametrize("text", TEXTS)
def test_one_bos_or_none(folder, text):
    plain = ids(builtin.tiny().tokenizer, text)
    made = hf_tokenizer.open_folder(str(folder))
    assert made.add_bos
    assert ids(made, text, add=False) == plain
    expected = plain if text.startswith("<|im_start|>") else [257, *plain]
    assert ids(made, text, add=True) == expected


@pytest.mark.parametrize(
    ("settings", "processor", "expected"),
    [
        ({"add_bos_token": True}, False, True),
        ({"add_bos_token": False}, True, False),
        ({}, True, True),
        ({}, False, False),
        ({"bos_token": None}, True, False),
    ],
)
def test_whether_a_bos_is_added(folder, settings, processor, expected):
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if not processor:
        backend.post_processor = None
    backend.save(str(folder / "tokenizer.json"))
    change(folder / "tokenizer_config.json", **settings)
    assert hf_tokenizer.open_folder(str(folder)).add_bos is expected


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_cover_the_text_in_characters(folder, text):
    made = hf_tokenizer.open_folder(str(folder))
    plain = made.encode(text, add_special_tokens=False)
    assert plain.ids.dtype == plain.offsets.dtype == np.int32
    assert plain.offsets.shape == (plain.ids.size, 2)
    # The tiny tokenizer has one token per byte: each covers the character that holds its byte.
    expected = []
    position = 0
    for part in re.split(r"(<\|im_start\|>|<\|im_end\|>)", text):
        if part.startswith("<|im_"):
            expected.append([position, position + len(part)])
        else:
            for i, character in enumerate(part):
                expected += [[position + i, position + i + 1]] * len(character.encode())
        position += len(part)
    assert plain.offsets.tolist() == expected
    with_bos = made.encode("é", add_special_tokens=True)
    assert with_bos.offsets.tolist() == [[0, 0], [0, 1], [0, 1]]


@pytest.mark.parametrize("text", TEXTS)
def test_decodes_what_it_encoded(folder, text):
    made = hf_tokenizer.open_folder(str(folder))
    assert made.decode(ids(made, text)) == text
    assert made.decode(made.encode(text, add_special_tokens=False).ids) == text
    without = re.sub(r"<\|im_\w+\|>", "", text)
    assert made.decode(ids(made, text, add=True), skip_special_tokens=True) == without


def test_every_end_token_is_known(folder):
    assert hf_tokenizer.open_folder(str(folder)).eos_ids == (258,)
    change(folder / "generation_config.json", eos_token_id=[256, 258, 256])
    made = hf_tokenizer.open_folder(str(folder))
    assert made.eos_ids == (258, 256)
    change(folder / "generation_config.json", eos_token_id=7)
    change(folder / "config.json", eos_token_id=[9, 7])
    assert hf_tokenizer.open_folder(str(folder)).eos_ids == (258, 7, 9)


def test_special_tokens_of_both_files(folder):
    change(folder / "special_tokens_map.json", eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    made = hf_tokenizer.open_folder(str(folder))
    assert made.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    assert (made.bos_id, made.bos_token) == (257, "<|im_start|>")
    assert (made.eos_token, made.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_chat_template_sources(folder):
    settings = folder / "tokenizer_config.json"
    assert hf_tokenizer.open_folder(str(folder)).chat_template is None
    change(settings, chat_template="one")
    assert hf_tokenizer.open_folder(str(folder)).chat_template == "one"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]
    change(settings, chat_template=named)
    assert hf_tokenizer.open_folder(str(folder)).chat_template == "two"
    (folder / "chat_template.jinja").write_text("three {{ 'é' }}", encoding="utf-8")
    assert hf_tokenizer.open_folder(str(folder)).chat_template == "three {{ 'é' }}"


def test_fingerprint_changes_with_everything_that_matters(folder):
    seen = [hf_tokenizer.open_folder(str(folder)).fingerprint()]
    assert hf_tokenizer.open_folder(str(folder)).fingerprint() == seen[0]

    def now_differs():
        seen.append(hf_tokenizer.open_folder(str(folder)).fingerprint())
        assert len(set(seen)) == len(seen)

    change(folder / "tokenizer_config.json", chat_template="one")
    now_differs()
    change(folder / "tokenizer_config.json", add_bos_token=False)
    now_differs()
    change(folder / "generation_config.json", eos_token_id=[256])
    now_differs()
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["vocab"] |= {"he": 256, "Ġt": 257}
    for entry in data["added_tokens"]:
        entry["id"] += 2
    data["post_processor"] = None
    model_files.write_json(folder / "tokenizer.json", data)
    now_differs()
    data["model"]["merges"] = [["h", "e"]]
    model_files.write_json(folder / "tokenizer.json", data)
    now_differs()


@pytest.mark.parametrize(("damage", "message"), model_files.JSON_DAMAGE)
@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
    ],
)
def test_damaged_json(folder, name, damage, message):
    change(folder / name)
    damage(folder / name)
    with pytest.raises(errors.ModelError, match=re.escape(str(folder / name)) + ".*" + message):
        hf_tokenizer.open_folder(str(folder))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (model_files.empty, "chat_template.jinja: is empty"),
        (model_files.other_encoding, "chat_template.jinja: is not UTF-8"),
        (model_files.loop, "chat_template.jinja: cannot be read"),
    ],
)
def test_damaged_template(folder, damage, message):
    (folder / "chat_template.jinja").write_text("x")
    damage(folder / "chat_template.jinja")
    with pytest.raises(errors.ModelError, match=message):
        hf_tokenizer.open_folder(str(folder))


@pytest.mark.parametrize(
    "entries",
    [
        {"model": None},
        {"model": {"type": "unheard of"}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}},
        {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
        {"added_tokens": 3},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}},
    ],
)
def test_unsound_tokenizer(folder, entries):
    change(folder / "tokenizer.json", **entries)
    with pytest.raises(errors.ModelError, match=r"tokenizer.json: is not a sound tokenizer \("):
        hf_tokenizer.open_folder(str(folder))


def test_added_tokens_that_would_get_other_ids(folder):
    data = json.loads((folder / "tokenizer.json").read_text())
    data["added_tokens"][1]["id"] = 300
    model_files.write_json(folder / "tokenizer.json", data)
    message = r"added_tokens = '<.im_\w+.>': is listed with id 300 but gets 25\d"
    with pytest.raises(errors.ModelError, match=message):
        hf_tokenizer.open_folder(str(folder))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"bos_token": 3}, "bos_token = 3: is neither a string nor an object with 'content'"),
        ({"eos_token": {"text": "x"}}, "eos_token = .*: is neither a string nor an object"),
        ({"bos_token": "<s>"}, "bos_token = '<s>': is not in the vocabulary"),
        ({"eos_token": "</s>"}, "eos_token = '</s>': is not in the vocabulary"),
        ({"add_bos_token": "yes"}, "add_bos_token = 'yes': is not a JSON boolean"),
        ({"add_bos_token": True, "bos_token": None}, "add_bos_token = True: there is no bos_tok"),
        ({"chat_template": 3}, "chat_template = 3: is not a JSON string or array"),
        ({"chat_template": ["x"]}, "chat_template = 'x': is not an object with 'name' and 'temp"),
        ({"chat_template": [{"name": "default"}]}, "is not an object with 'name' and 'template'"),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, r"\['rag'\]: has no 'default'"),
    ],
)
def test_wrong_settings(folder, entries, message):
    change(folder / "tokenizer_config.json", **entries)
    with pytest.raises(errors.ModelError, match=message):
        hf_tokenizer.open_folder(str(folder))


def test_end_id_beyond_the_vocabulary(folder):
    change(folder / "generation_config.json", eos_token_id=[258, 5000])
    with pytest.raises(errors.ModelError, match="eos_token_id = 5000: is not in the vocabulary"):
        hf_tokenizer.open_folder(str(folder))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokenizer.model", "it holds only tokenizer.model: convert it once with transformers"),
        ("vocab.json", "it holds only vocab.json: convert it once with transformers"),
        ("other", "has no tokenizer.json; download it into the folder"),
    ],
)
def test_no_tokenizer_json(tmp_path, name, message):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(errors.ModelError, match=message):
        hf_tokenizer.open_folder(str(tmp_path))


def test_text_and_ids_that_are_not_tokens():
    made = builtin.tiny().tokenizer
    with pytest.raises(errors.DataError, match="holds half of a surrogate pair"):
        made.encode("a\ud800", add_special_tokens=False)
    with pytest.raises(errors.DataError, match="token id = 259: is not in the vocabulary"):
        made.token(259)


@pytest.mark.reference
@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_transformers(folder, text):
    import transformers

    data = json.loads((folder / "tokenizer.json").read_text())
    data |= {"truncation": None, "padding": None}
    model_files.write_json(folder / "tokenizer.json", data)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    change(folder / "tokenizer_config.json", **settings)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    made = hf_tokenizer.open_folder(str(folder))
    assert ids(made, text) == theirs.encode(text, add_special_tokens=False)
    if not text.startswith("<|im_start|>"):  # transformers doubles the BOS
        assert ids(made, text, add=True) == theirs.encode(text)


# ---- GGUF: byte-level BPE ----------------------------------------------------------------------


def open_gguf(path, **changes) -> tokenizer.Tokenizer:
    fields = model_files.tokenizer_fields()
    fields |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    model_files.write_gguf(path, fields, {})
    return tokenizer_read.read(gguf_file.open_container(str(path)))


def test_gguf_tokenizer(tmp_path):
    made = open_gguf(tmp_path / "a.gguf", eot_token_id=256, eom_token_id=258, padding_token_id=256)
    assert [made.token(i) for i in ids(made, "the the<|im_end|>")] == [
        "t", "he", "Ġt", "he", "<|im_end|>",
    ]  # fmt: skip
    assert made.eos_ids == (258, 256)
    assert made.vocab_size == model_files.GGUF_VOCAB
    assert (made.bos_id, made.eos_token, made.pad_token) == (257, "<|im_end|>", "<|endoftext|>")
    assert made.chat_template == builtin.tiny().tokenizer.chat_template
    for text in TEXTS:
        assert made.decode(ids(made, text)) == text
    assert made.decode([257, *ids(made, "he")], skip_special_tokens=True) == "he"


@pytest.mark.parametrize(
    ("pre", "stated", "expected"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("smollm", None, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_gguf_bos(tmp_path, pre, stated, expected):
    made = open_gguf(tmp_path / "a.gguf", pre=pre, add_bos_token=stated)
    assert made.add_bos is expected
    assert ids(made, "h", add=True) == [257] * expected + ids(made, "h")
    assert ids(made, "<|im_start|>h", add=True) == ids(made, "<|im_start|>h")


def test_gguf_without_bos_adds_none(tmp_path):
    made = open_gguf(tmp_path / "a.gguf", pre="llama-bpe", add_bos_token=None, bos_token_id=None)
    assert made.add_bos is False


WORDS = "I'LL pay  12345 for\n\n 67\tx²!?\n"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smollm", "I|'|LL| pay|  |1|2|3|4|5| for|\n\n |6|7|\t|x|²|!?|\n"),
        ("gpt-2", "I|'|LL| pay| | 12345| for|\n\n| 67|\t|x|²|!?|\n"),
        ("default", "I|'|LL| pay| | 12345| for|\n\n| 67|\t|x|²|!?|\n"),
        ("llama-bpe", "I|'LL| pay| | |123|45| for|\n\n| |67|\tx|²|!?\n"),
        ("llama3", "I|'LL| pay| | |123|45| for|\n\n| |67|\tx|²|!?\n"),
        ("qwen2", "I|'LL| pay| | |1|2|3|4|5| for|\n\n| |6|7|\tx|²|!?\n"),
    ],
)
def test_pre_tokenizers_cut_as_published(tmp_path, pre, words):
    made = open_gguf(tmp_path / "a.gguf", pre=pre)
    pieces = made.backend.pre_tokenizer.pre_tokenize_str(WORDS)
    assert [WORDS[start:end] for _, (start, end) in pieces] == words.split("|")


def test_qwen_normalises(tmp_path):
    made = open_gguf(tmp_path / "a.gguf", pre="qwen2")
    assert ids(made, "e\u0301") == ids(made, "é")
    encoded = made.encode("e\u0301x", add_special_tokens=False)
    assert encoded.offsets.tolist()[-1] == [2, 3]


def test_llama3_takes_whole_words_first(tmp_path):
    fields = model_files.tokenizer_fields()
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    extended = {"tokens": [*tokens, "the"], "token_type": [*types, 1]}
    assert len(ids(open_gguf(tmp_path / "a.gguf", pre="llama-bpe", **extended), "the")) == 1
    assert len(ids(open_gguf(tmp_path / "a.gguf", pre="gpt-2", **extended), "the")) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "has no metadata 'tokenizer.ggml.model'"),
        ({"model": "bert"}, "tokenizer.ggml.model = 'bert': is a tokenizer that is not read"),
        ({"model": 3}, "tokenizer.ggml.model = 3: is not a str"),
        ({"pre": None}, "has no metadata 'tokenizer.ggml.pre'"),
        ({"pre": "tekken"}, "pre = 'tekken': is a pre-tokenizer that is not known; known: smol"),
        ({"tokens": None}, "has no metadata 'tokenizer.ggml.tokens'"),
        ({"tokens": [1, 2]}, "is not a list of str"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "tokens: lists a token twice"),
        ({"token_type": None}, "has no metadata 'tokenizer.ggml.token_type'"),
        ({"token_type": [1]}, "token_type = 1: types for 261 tokens"),
        ({"token_type": 5}, "token_type = 5: is not a list"),
        ({"merges": None}, "has no metadata 'tokenizer.ggml.merges'"),
        ({"merges": ["ab"]}, "merges = 'ab': is not two tokens"),
        ({"merges": ["a Ġ"]}, "is not a sound tokenizer .*out of vocabulary"),
        ({"bos_token_id": 261}, "bos_token_id = 261: is not one of the 261 tokens"),
        ({"eot_token_id": 9999}, "eot_token_id = 9999: is not one of the 261 tokens"),
        ({"eos_token_id": "x"}, "eos_token_id = 'x': is not a int"),
        ({"add_bos_token": 1}, "add_bos_token = 1: is not a bool"),
        ({"model": "llama"}, "has no metadata 'tokenizer.ggml.scores'"),
        ({"model": "llama", "scores": [0.0]}, "scores = 1: scores for 261 tokens"),
    ],
)
def test_gguf_tokenizer_that_cannot_be_used(tmp_path, changes, message):
    with pytest.raises(errors.ModelError, match=message):
        open_gguf(tmp_path / "a.gguf", **changes)


# ---- GGUF: sentencepiece -----------------------------------------------------------------------


def pieces_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """Sentencepiece's BPE, literally: join the best-scored neighbours until none are left."""
    parts = list(text)
    while True:
        joins = [
            (scores[left + right], -i)
            for i, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in scores
        ]
        if not joins:
            break
        at = -max(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        piece
        for part in parts
        for piece in ([part] if part in scores else [f"<0x{b:02X}>" for b in part.encode()])
    ]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """A tokenizer of 400 random pieces over few letters, and their scores."""
    draw = np.random.default_rng(3)
    letters = list("▁abcdeé")
    found = dict.fromkeys(letters)
    while len(found) < 400:
        pieces = list(found)
        found["".join(draw.choice(pieces[: 3 * len(letters) + len(pieces) // 3], 2))] = None
    normal = [piece for piece in found if len(piece) <= 8]
    special = ["<unk>", "<s>", "</s>"]
    tokens = special + [f"<0x{i:02X}>" for i in range(256)] + normal
    scores = {piece: -float(rank) for rank, piece in enumerate(draw.permutation(normal))}
    fields = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(normal),
        "scores": [scores.get(token, 0.0) for token in tokens],
        "merges": None,
        "pre": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": None,
    }
    return fields, scores, tmp_path_factory.mktemp("sentencepiece") / "a.gguf"


def test_sentencepiece_joins_by_score(sentencepiece):
    fields, scores, path = sentencepiece
    made = open_gguf(path, **fields)
    draw = np.random.default_rng(5)
    for _ in range(300):
        text = "".join(draw.choice(list(" abcdeéz你"), draw.integers(1, 30)))
        encoded = made.encode(text, add_special_tokens=False)
        expected = pieces_by_score("▁" + text.replace(" ", "▁"), scores)
        assert [made.token(i) for i in encoded.ids] == expected, text
        assert made.decode(encoded.ids) == text
        assert encoded.offsets.max() == len(text)


def test_sentencepiece_joins_runs_from_the_left(tmp_path):
    runs = ["b" * n for n in range(1, 17)]
    draw = np.random.default_rng(0)
    for order in [runs, *(draw.permutation(runs) for _ in range(20))]:
        scores = {run: -float(i) for i, run in enumerate(order)}
        fields = {
            "model": "llama",
            "tokens": runs,
            "token_type": [1] * 16,
            "scores": [scores[run] for run in runs],
            "merges": None,
            "bos_token_id": None,
            "eos_token_id": None,
            "add_space_prefix": False,
        }
        made = open_gguf(tmp_path / "a.gguf", **fields)
        for length in range(1, 70):
            found = [made.token(i) for i in ids(made, "b" * length)]
            assert found == pieces_by_score("b" * length, scores), (order, length)


def test_sentencepiece_settings(sentencepiece):
    fields, scores, path = sentencepiece
    made = open_gguf(path, **fields)
    assert made.add_bos
    assert ids(made, "a", add=True)[0] == 1
    assert ids(made, "<s>a</s>", add=True)[0] == 1
    assert ids(made, "<s>a</s>", add=True).count(1) == 1
    assert ids(made, "<s>a</s>")[-1] == 2
    bare = open_gguf(path, **fields, add_space_prefix=False)
    assert [bare.token(i) for i in ids(bare, "abad")] == pieces_by_score("abad", scores)
    assert bare.decode(ids(bare, " a b")) == " a b"


# ---- a real tokenizer --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    return builtin.open_model("smollm2-135m").tokenizer


@pytest.mark.download
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x  2 y\n\n  3\tz 12", [104, 256, 34, 329, 39892, 35, 197, 106, 216, 33, 34]),
        ("The capital of France is", SMOLLM2["plain"]["prompt_ids"]),
        (SMOLLM2["plain"]["text"], SMOLLM2["plain"]["new_ids"]),
        (SMOLLM2["chat_text"], SMOLLM2["chat"]["prompt_ids"]),
        (SMOLLM2["para"]["text"], SMOLLM2["para"]["ids"]),
        (SMOLLM2["sft"]["text"], SMOLLM2["sft"]["ids"]),
        *((case["text"], case["smollm_pre_ids"]) for case in SMOLLM2["tokenizer"]),
    ],
)
def test_smollm2_ids(smollm2, text, expected):
    assert ids(smollm2, text) == expected
    assert ids(smollm2, text, add=True) == expected
    assert smollm2.decode(expected) == unicodedata.normalize("NFC", text)


@pytest.mark.download
def test_smollm2_settings(smollm2):
    assert smollm2.eos_ids == (2,)
    assert smollm2.vocab_size == 49152
    assert smollm2.add_bos is False
    assert smollm2.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert "You are a helpful AI assistant named SmolLM" in smollm2.chat_template
