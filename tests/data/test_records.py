"""Reading data files: shapes, and every way in which a file can be wrong."""

import json
import os

import pytest

from purelora.core import errors
from purelora.data import records, sets
from tests.support.data_samples import write_jsonl

USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}
PAIR = (USER, ASSISTANT)


def read_rows(tmp_path, rows, suffix="jsonl"):
    path = tmp_path / f"train.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    else:
        write_jsonl(path, rows)
    return records.read(path)


CHATS = {
    "messages": ({"messages": [USER, ASSISTANT]}, "messages", PAIR, (False, True)),
    "prompt": ({"prompt": "q", "completion": "a"}, "prompt", PAIR, (False, True)),
    "prompt messages": (
        {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]},
        "prompt",
        (*PAIR, *PAIR),
        (False, False, False, True),
    ),
    "question": ({"question": "q", "answer": "a"}, "question", PAIR, (False, True)),
    "instruction": ({"instruction": "q", "output": "a"}, "instruction", PAIR, (False, True)),
    "instruction with input": (
        {"instruction": "q", "input": "x", "output": "a"},
        "instruction",
        ({"role": "user", "content": "q\n\nx"}, ASSISTANT),
        (False, True),
    ),
    "instruction with empty input": (
        {"instruction": "q", "input": "", "output": "a"},
        "instruction",
        PAIR,
        (False, True),
    ),
    "conversations": (
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "q"},
                {"from": "gpt", "value": "a"},
                {"from": "tool", "value": "t"},
                {"from": "assistant", "value": "a"},
            ]
        },
        "conversations",
        (
            {"role": "system", "content": "s"},
            *PAIR,
            {"role": "tool", "content": "t"},
            ASSISTANT,
        ),
        (False, False, True, False, True),
    ),
    "system column": (
        {"system": "s", "question": "q", "answer": "a"},
        "question",
        ({"role": "system", "content": "s"}, *PAIR),
        (False, False, True),
    ),
    "other columns": (
        {"id": 7, "source": None, "text": None, "messages": [USER, ASSISTANT]},
        "messages",
        PAIR,
        (False, True),
    ),
    "train flags": (
        {"messages": [USER, {**ASSISTANT, "train": False}, USER, {**ASSISTANT, "train": True}]},
        "messages",
        (*PAIR, *PAIR),
        (False, False, False, True),
    ),
    "text parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]},
                ASSISTANT,
            ]
        },
        "messages",
        ({"role": "user", "content": "ab"}, ASSISTANT),
        (False, True),
    ),
    "tool call without content": (
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"f": 1}]}]},
        "messages",
        (USER, {"role": "assistant", "content": None, "tool_calls": [{"f": 1}]}),
        (False, True),
    ),
}


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@pytest.mark.parametrize("name", CHATS)
def test_chat_shapes(tmp_path, name, suffix):
    row, shape, messages, train = CHATS[name]
    (record,) = read_rows(tmp_path, [row], suffix)
    where = f"{tmp_path}/train.{suffix}:" + ("1" if suffix == "jsonl" else "2")
    assert record == records.Chat(where, shape, messages, train)


def test_shape_is_found_row_by_row(tmp_path):
    found = read_rows(tmp_path, [{"text": "t"}, CHATS["prompt"][0], CHATS["messages"][0]])
    assert [record.shape for record in found] == ["text", "prompt", "messages"]
    assert found[0] == records.Text(f"{tmp_path}/train.jsonl:1", "t")


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]'])
def test_tools_as_list_and_as_json(tmp_path, tools):
    (record,) = read_rows(tmp_path, [{"messages": [USER, ASSISTANT], "tools": tools}])
    assert record.tools == ({"name": "f"},)


@pytest.mark.parametrize("tools", [None, [], "[]"])
def test_no_tools(tmp_path, tools):
    (record,) = read_rows(tmp_path, [{"messages": [USER, ASSISTANT], "tools": tools}])
    assert record.tools is None


BAD_ROWS = {
    "two shapes": (
        {"text": "t", "messages": [USER, ASSISTANT]},
        r"train\.jsonl:1 = .*fits several shapes: text and messages; keep one",
    ),
    "list": ([1], r"train\.jsonl:1 = \[1\]: is a list, where an object should be"),
    "null text": ({"text": None}, r"train\.jsonl:1: text: is null, where a string should be"),
    "number text": ({"text": 3}, r":1: text = 3: is a number, where a string"),
    "null content": (
        {"messages": [{"role": "user", "content": None}, ASSISTANT]},
        r":1: messages\[0\]\.content: is null, where a string",
    ),
    "number content": (
        {"messages": [USER, {"role": "assistant", "content": 4.5}]},
        r":1: messages\[1\]\.content = 4\.5: is a number, where a string",
    ),
    "no content": ({"messages": [{"role": "user"}]}, r"messages\[0\]\.content: is null"),
    "image part": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        r"messages\[0\]\.content\[0\] = .*is no text part",
    ),
    "messages not a list": ({"messages": "hi"}, r":1: messages = 'hi': is a string, where a list"),
    "message not an object": ({"messages": ["hi"]}, r"messages\[0\] = 'hi': is a string, where an"),
    "no role": ({"messages": [{"content": "c"}]}, r"messages\[0\] = .*has no 'role'; add it: sys"),
    "unknown role": (
        {"messages": [USER, {"role": "asistant", "content": "a"}]},
        r"messages\[1\]\.role = 'asistant': is no known role; did you mean 'assistant'\?",
    ),
    "unknown sender": (
        {"conversations": [{"from": "humen", "value": "q"}]},
        r"conversations\[0\]\.from = 'humen': is no known role; did you mean 'human'",
    ),
    "sender without value": ({"conversations": [{"from": "human"}]}, r"has 'from' but no 'value'"),
    "sender not a string": ({"conversations": [{"from": [1], "value": "q"}]}, r"no known role"),
    "no assistant": ({"messages": [USER, USER]}, r":1: messages = .*has no assistant message"),
    "no messages": ({"messages": []}, r":1: messages = \[\]: has no assistant message"),
    "prompt is messages, completion is not": (
        {"prompt": [USER], "completion": "a"},
        r":1: completion = 'a': is a string, where a list of messages",
    ),
    "half a shape": (
        {"instruction": "q", "response": "a"},
        r"\['instruction', 'response'\]: has 'instruction' but no 'output'; rename or add it",
    ),
    "near name": ({"mesages": []}, r"has no known shape; 'mesages': did you mean 'messages'\?"),
    "nothing known": ({"foo": 1}, r"has no known shape; known: text, messages, conv"),
    "train on a user message": (
        {"messages": [{**USER, "train": True}, ASSISTANT]},
        r"messages\[0\]\.train = True: a user message cannot train",
    ),
    "train not a boolean": (
        {"messages": [USER, {**ASSISTANT, "train": 1}]},
        r"messages\[1\]\.train = 1: is a number, where a boolean",
    ),
    "two system prompts": (
        {"system": "s", "messages": [{"role": "system", "content": "s"}, USER, ASSISTANT]},
        r":1: system = 's': is given beside a system message",
    ),
    "tools not a list": (
        {"messages": [USER, ASSISTANT], "tools": {"a": 1}},
        r":1: tools = .*is an object, where a list",
    ),
    "tools not JSON": (
        {"messages": [USER, ASSISTANT], "tools": "[{"},
        r":1: tools = '\[\{': is not valid JSON",
    ),
    "half a surrogate pair": ({"text": "ab\ud800"}, r"has half a surrogate pair at character 2"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows(tmp_path, name):
    row, message = BAD_ROWS[name]
    with pytest.raises(errors.DataError, match=message):
        read_rows(tmp_path, [row])


BAD_LINES = {
    "truncated": (b'{"text": "a"}\n\n{"text": "b', r"train\.jsonl:3 = .*is not valid JSON"),
    "duplicate key": (
        b'{"text": "a", "text": "b"}',
        r":1 = .*has the key 'text' twice in one object; keep one",
    ),
    "nested too deep": (b"[" * 200_000, r":1 = .*is not valid JSON"),
    "not UTF-8": (
        b'{"text": "a"}\n{"text": "\xe9"}\n',
        r":2 = b'\\xe9': is not UTF-8 \(byte 24 of the file\)",
    ),
    "not UTF-8 behind a BOM": (b'\xef\xbb\xbf{"text": "\xe9"}', r":1 = .*\(byte 13 of the file\)"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), r"is UTF-16; save it as UTF-8"),
    "empty": (b"", r"train\.jsonl: holds no records"),
    "blank": (b"\n \r\n\n", r"train\.jsonl: holds no records"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_lines(tmp_path, name):
    data, message = BAD_LINES[name]
    path = tmp_path / "train.jsonl"
    path.write_bytes(data)
    with pytest.raises(errors.DataError, match=message):
        records.read(path)


BAD_LISTS = {
    "truncated": (b'[{"text": "a"},\n {"text": "b"', r"train\.json:2 = .*is not valid JSON"),
    "no comma": (b'[{"text": "a"}\n\n{"text": "b"}]', r"train\.json:3 = .*is not valid JSON"),
    "object": (b'{"text": "a"}', r"train\.json:1 = .*is not a list of objects; put the rows"),
    "more behind it": (b'[{"text": "a"}] x', r"is not valid JSON \(Extra data"),
    "duplicate key": (b'[{"text": "a", "text": "b"}]', r"has the key 'text' twice"),
    "bad row": (b'[\n{"text": "a"}\n,\n\n{"text":\n 1}]', r"train\.json:5: text = 1: is a number"),
    "empty": (b" ", r"train\.json: holds no records"),
    "no rows": (b"[]", r"train\.json: holds no records"),
}


@pytest.mark.parametrize("name", BAD_LISTS)
def test_bad_lists(tmp_path, name):
    data, message = BAD_LISTS[name]
    path = tmp_path / "train.json"
    path.write_bytes(data)
    with pytest.raises(errors.DataError, match=message):
        records.read(path)


def test_lines_are_counted_through_blanks_and_odd_separators(tmp_path):
    path = tmp_path / "train.jsonl"
    # A BOM, Windows line ends, blank lines, and U+2028 inside a string.
    path.write_bytes(b"\xef\xbb\xbf" + '{"text": "a\u2028b"}\r\n\r\n \n{"text": "c"}\r\n'.encode())
    assert records.read(path) == [
        records.Text(f"{path}:1", "a\u2028b"),
        records.Text(f"{path}:4", "c"),
    ]


def test_all_problems_of_a_file_together(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": 1}\n{"te\n{"text": "fine"}\n[]\n')
    with pytest.raises(errors.DataError) as caught:
        records.read(path)
    assert [problem.where for problem in caught.value.problems] == [
        f"{path}:1: text",
        f"{path}:2",
        f"{path}:4",
    ]


def test_long_lists_of_problems_are_cut_and_counted(tmp_path):
    with pytest.raises(errors.DataError) as caught:
        read_rows(tmp_path, [{"text": 1}] * 33)
    problems = caught.value.problems
    assert len(problems) == 21
    assert "13 more problems" in str(problems[-1])


def test_long_values_are_shortened(tmp_path):
    with pytest.raises(errors.DataError) as caught:
        read_rows(tmp_path, [{"messages": "x" * 10_000}])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.jsonl", "does not exist"),
        ("folder.jsonl", "is a directory"),
        ("pipe.jsonl", "is no regular file"),
        ("table.csv", r"has the unknown suffix '\.csv'"),
        ("loop.jsonl", "cannot be read"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, message):
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "table.csv").write_text("a,b")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    with pytest.raises(errors.DataError, match=message):
        records.read(tmp_path / name)


def test_built_in_set_by_name():
    found = records.read(sets.resolve("wordnet-definitions", "data.train"))
    assert 1_500 <= len(found) <= 2_000
    assert {record.shape for record in found} == {"question"}
    words = [record.messages[1]["content"].split()[0] for record in found]
    assert words == sorted(set(words))
    assert all(
        f'"{word}"' in record.messages[0]["content"]
        for word, record in zip(words, found, strict=True)
    )


def test_built_in_sets_state_their_source_and_licence():
    for name in sets.names():
        source = (
            sets.resolve(name, "data.train").with_suffix(".SOURCE.md").read_text(encoding="utf-8")
        )
        assert "Source:" in source
        assert "Licence" in source


def test_paths_pass_and_unknown_names_do_not(tmp_path):
    assert sets.resolve("some/folder", "data.train") == sets.pathlib.Path("some/folder")
    assert sets.resolve("train.jsonl", "data.train") == sets.pathlib.Path("train.jsonl")
    with pytest.raises(errors.DataError, match="did you mean 'wordnet-definitions'"):
        sets.resolve("wordnet-definition", "data.train")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "train": False}, "train.*read in messages only"),
        ({"prompt": "a", "completion": "b", "weight": 0}, "weight.*read in messages only"),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": 0}]},
            r"messages\[0\]\.weight = 0: is not read",
        ),
    ],
)
def test_what_would_leave_a_row_out_elsewhere_is_not_ignored(tmp_path, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(errors.DataError, match=message):
        records.read(path)
