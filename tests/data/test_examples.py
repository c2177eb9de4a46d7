"""Records to examples: BOS and EOS, masks, lengths, the report, the split."""

import numpy as np
import pytest

from purelora.core import errors
from purelora.data import examples, records
from tests.support.data_samples import (
    CHATML,
    GEMMA3,
    LLAMA3,
    QWEN3,
    THREE_TURNS,
    chat_record,
    encoder,
    make_tokenizer,
    pair,
)

NO_BOS_TEMPLATE = CHATML
ASKED, ANSWERED = THREE_TURNS[:2]


def encoded_text(tokenizer, example):
    """All text, and what of it is a target."""
    return (
        tokenizer.decode(example.tokens),
        tokenizer.decode(example.tokens[example.supervised]),
    )


def text(content, line=1):
    return records.Text(f"train.jsonl:{line}", content)


# One BOS ----------------------------------------------------------------------------------------

BOS_CASES = {
    "template has it, tokenizer adds it": (LLAMA3, True, chat_record(), 1),
    "template has it, tokenizer does not": (LLAMA3, False, chat_record(), 1),
    "template has none, tokenizer adds it": (NO_BOS_TEMPLATE, True, chat_record(), 1),
    "neither": (NO_BOS_TEMPLATE, False, chat_record(), 0),
    "text": (None, True, text("one two"), 1),
    "text that begins with it": (None, True, text("<s>one two"), 1),
    "text, not added": (None, False, text("one two"), 0),
    "pair without template": (None, True, pair("one", " two"), 1),
}


@pytest.mark.parametrize("task", ["sft", "pretrain"])
@pytest.mark.parametrize("name", BOS_CASES)
def test_exactly_one_bos(name, task):
    template, add_bos, record, count = BOS_CASES[name]
    tokenizer = make_tokenizer(template, add_bos=add_bos)
    example = encoder(tokenizer, task=task).encode(record).example
    assert (example.tokens == tokenizer.bos_id).sum() == count
    assert (example.tokens[0] == tokenizer.bos_id) == bool(count)
    assert not example.supervised[0]
    assert example.tokens.dtype == np.int32
    assert example.supervised.dtype == np.bool_


# EOS --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad_token", [None, "</s>"])
@pytest.mark.parametrize("answer", [" two", " two</s>"])
def test_pair_without_template(answer, pad_token):
    """One EOS, supervised, also when it pads and when the prompt has it."""
    tokenizer = make_tokenizer(pad_token=pad_token)
    example = encoder(tokenizer).encode(pair("one</s>", answer)).example
    assert encoded_text(tokenizer, example) == ("one</s> two</s>", " two</s>")
    assert example.supervised[-1]


@pytest.mark.parametrize(
    ("shape", "want"), [("prompt", "onetwo</s>"), ("question", "one\ntwo</s>")]
)
def test_what_stands_between_question_and_answer(shape, want):
    tokenizer = make_tokenizer()
    example = encoder(tokenizer).encode(pair("one", "two", shape)).example
    assert encoded_text(tokenizer, example)[0] == want


@pytest.mark.parametrize(("answer", "mask"), [("\u00e9", [0, 0, 0, 1, 1, 1]), ("", [0, 0, 0, 1])])
def test_mask_of_bytes(answer, mask):
    # The merges of the test tokenizer leave "zzz" and the two bytes of é single.
    example = encoder(make_tokenizer()).encode(pair("zzz", answer)).example
    assert example.supervised.astype(int).tolist() == mask


@pytest.mark.parametrize("task", ["sft", "pretrain"])
@pytest.mark.parametrize("content", ["one two", "one two</s>"])
def test_text_ends_in_one_eos(content, task):
    tokenizer = make_tokenizer(add_bos=True)
    example = encoder(tokenizer, task=task).encode(text(content)).example
    assert encoded_text(tokenizer, example) == ("<s>one two</s>", "one two</s>")


def test_pretraining_supervises_all_of_a_chat():
    tokenizer = make_tokenizer(LLAMA3, add_bos=True)
    example = encoder(tokenizer, task="pretrain").encode(chat_record()).example
    assert example.supervised[1:].all()
    assert tokenizer.decode(example.tokens).endswith("tres.<|eot|>")


def test_pretraining_supervises_all_of_a_pair():
    tokenizer = make_tokenizer()
    example = encoder(tokenizer, task="pretrain").encode(pair("zzz", "y")).example
    assert example.supervised.astype(int).tolist() == [0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("end_tokens", "count"),
    [(("<end>",), 0), (("<|eot|>", "<end>"), 0), (("<|eot|>",), 3), ((), 3)],
)
def test_turns_that_end_in_no_end_token_are_counted(end_tokens, count):
    """Gemma ends turns in another token than its eos_token: both must be known."""
    tokenizer = make_tokenizer(GEMMA3, end_tokens=end_tokens)
    encoded = encoder(tokenizer).encode(chat_record())
    assert encoded.turns_without_end_token == count
    end = tokenizer.backend.token_to_id("<end>")
    example = encoded.example
    assert example.supervised[example.tokens == end].sum() == 3


def test_missing_eos_token_is_an_error():
    with pytest.raises(errors.DataError, match=r"train\.jsonl:1: needs an end token.*no eos_token"):
        encoder(make_tokenizer(eos_token=None)).encode(text("one"))


def test_chat_without_template_is_an_error():
    with pytest.raises(errors.DataError, match=r"train\.jsonl:1 = .*needs a chat template"):
        encoder(make_tokenizer()).encode(chat_record())


# Lengths, empty masks ---------------------------------------------------------------------------


def build(made, tokenizer, *, max_length=64, too_long="drop", **options):
    return examples.build(
        made, encoder(tokenizer, **options), max_length=max_length, too_long=too_long
    )


LONG = pair("z" * 60, "y")
SHORT = pair("zzz", "yy")  # 6 tokens with the EOS


def test_drop():
    built = build([SHORT, LONG, SHORT], make_tokenizer(), max_length=16)
    assert [len(example.tokens) for example in built.examples] == [6, 6]
    assert (built.report.too_long, built.report.unsupervised, built.report.kept) == (1, 0, 2)


def test_truncation_that_leaves_no_target_is_reported():
    built = build([SHORT] * 7 + [LONG], make_tokenizer(), max_length=16, too_long="truncate")
    assert len(built.examples) == 7
    assert (built.report.too_long, built.report.unsupervised, built.report.kept) == (1, 1, 7)
    assert built.report.tokens == 42
    assert built.report.supervised_tokens == 21


def test_truncation_keeps_the_targets_that_survive():
    tokenizer = make_tokenizer(CHATML)
    whole = encoder(tokenizer).encode(chat_record()).example
    cut = np.flatnonzero(whole.supervised)[-8]
    (example,) = build([chat_record()], tokenizer, max_length=cut, too_long="truncate").examples
    np.testing.assert_array_equal(example.tokens, whole.tokens[:cut])
    np.testing.assert_array_equal(example.supervised, whole.supervised[:cut])
    assert example.supervised[-1]


def test_too_long_raises_with_line_and_length():
    made = [pair("zzz", "yy", line=line) for line in range(1, 31)]
    made[4] = pair("z" * 60, "y", line=5)
    with pytest.raises(
        errors.DataError, match=r"^train\.jsonl:5 = 62: tokens, more than max_length = 16; raise"
    ):
        build(made, make_tokenizer(), max_length=16, too_long="raise")
    with pytest.raises(errors.DataError) as caught:
        build(made, make_tokenizer(), max_length=5, too_long="raise")
    assert len(caught.value.problems) == 21
    assert len(build(made, make_tokenizer(), max_length=62, too_long="raise").examples) == 30


@pytest.mark.parametrize(
    ("too_long", "message"),
    [
        ("truncate", "none of its 8 records .*8 are longer than 16 tokens.*8 have no token"),
        ("drop", "none of its 8 records .*8 are longer than 16 tokens and were dropped"),
    ],
)
def test_nothing_left_stops_before_training(too_long, message):
    with pytest.raises(errors.DataError, match=rf"^train\.jsonl: {message}.*raise max_length"):
        build([LONG] * 8, make_tokenizer(), max_length=16, too_long=too_long)


def test_nothing_trained_stops_before_training():
    record = chat_record(train=[False] * 6)
    with pytest.raises(errors.DataError, match="1 have no token to train on; let assistant"):
        build([record], make_tokenizer(CHATML), max_length=512)


def test_empty_answer_still_teaches_to_stop():
    made = [chat_record((ASKED, {"role": "assistant", "content": ""}))]
    tokenizer = make_tokenizer(CHATML)
    (example,) = build(made, tokenizer).examples
    assert encoded_text(tokenizer, example)[1] == "<|im_end|>\n"


def test_a_first_token_is_no_target():
    # One token, the EOS: nothing predicts it.
    with pytest.raises(errors.DataError, match="1 have no token to train on"):
        build([text("")], make_tokenizer())


# The report -------------------------------------------------------------------------------------


def test_report():
    made = [chat_record(), chat_record((ASKED, ANSWERED)), text("zz"), LONG]
    built = build(
        made,
        make_tokenizer(QWEN3, end_tokens=()),
        max_length=60,
        unnested_template="last_turn",
    )
    report = built.report
    assert dict(report.shapes) == {"messages": 2, "text": 1, "prompt": 1}
    assert report.records == 4
    assert report.kept == len(built.examples) == 4 - report.too_long
    assert report.last_turn_only == 1
    assert report.turns_without_end_token == 3
    assert report.tokens == sum(len(example.tokens) for example in built.examples)
    shown = str(report)
    assert "4 records (messages 2, text 1, prompt 1)" in shown
    assert f"{report.too_long} longer than 60 tokens: dropped" in shown
    assert "1 trained on the last turn only" in shown
    assert "3 trained turns end in no end token" in shown
    assert "without a target" not in shown


def test_fingerprint_sees_tokens_masks_order_and_borders():
    def example(tokens, mask):
        return examples.Example(np.array(tokens, np.int32), np.array(mask, np.bool_))

    a, b = example([1, 2, 3], [0, 1, 1]), example([4, 5], [0, 1])
    other = [
        [a],
        [b, a],
        [a, example([4, 6], [0, 1])],
        [a, example([4, 5], [0, 0])],
        [example([1, 2], [0, 1]), example([3, 4, 5], [1, 0, 1])],
    ]
    prints = {examples.fingerprint(made) for made in ([a, b], *other)}
    assert len(prints) == 6
    # The same bytes but for where an example ends.
    one, two = [example([7, 1], [0, 1])], [example([7], [1]), example([0], [1])]
    assert examples.fingerprint(one) != examples.fingerprint(two)
    again = example([1, 2, 3], [0, 1, 1])
    assert examples.fingerprint([again, b]) == examples.fingerprint([a, b])


# The split --------------------------------------------------------------------------------------


def numbered(count):
    return [
        examples.Example(np.array([i, i], np.int32), np.array([False, True])) for i in range(count)
    ]


def numbers(made):
    return [int(example.tokens[0]) for example in made]


@pytest.mark.parametrize(("count", "fraction", "size"), [(10, 0.2, 2), (101, 0.5, 50), (2, 0.5, 1)])
def test_split_is_a_partition(count, fraction, size):
    made = examples.split(numbered(count), fraction, seed=3)
    train, evaluation = numbers(made.train), numbers(made.evaluation)
    assert len(evaluation) == size
    assert sorted(train + evaluation) == list(range(count))
    assert train == sorted(train)
    again = examples.split(numbered(count), fraction, seed=3)
    assert numbers(again.evaluation) == evaluation


def test_split_depends_on_the_seed():
    chosen = {
        tuple(numbers(examples.split(numbered(100), 0.1, seed=seed).evaluation))
        for seed in range(5)
    }
    assert len(chosen) == 5


@pytest.mark.parametrize(
    ("count", "fraction", "side"), [(10, 0.01, "evaluation"), (10, 0.99, "training"), (1, 0.5, "e")]
)
def test_split_refuses_an_empty_side(count, fraction, side):
    with pytest.raises(errors.ConfigError, match=f"data.eval_fraction = .*no example for {side}"):
        examples.split(numbered(count), fraction, seed=0)
