"""Makes purelora/data/files/wordnet-definitions.jsonl from the dict folder of WordNet 3.0.

    python benchmarks/make_wordnet_set.py /usr/share/wordnet purelora/data/files

Each row asks what a common English word means; the answer is WordNet's gloss of its main sense, in
one style. A word is taken if one sense has nearly all of its tags in WordNet's count of a corpus.
"""

import argparse
import collections
import hashlib
import json
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import NamedTuple

SET = "wordnet-definitions.jsonl"
MIN_TAGS = 3
MIN_SHARE = 0.7
MAX_SENSES = 5

PARTS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
SENSE_TYPES = {"n": 1, "v": 2, "a": 3, "r": 4, "s": 5}
FILES = ("noun", "verb", "adj", "adv")
# Animals, body parts, plants and relations of kin and people: taxonomy, anatomy, and most of what
# could offend.
LEFT_OUT_TOPICS = {5, 8, 18, 20}

QUESTIONS = (
    'What does "{}" mean?',
    'What is the meaning of "{}"?',
    'Define "{}".',
    'Can you define the word "{}"?',
    'How would you explain the word "{}"?',
    'Give me a definition of "{}".',
    'What do people mean by "{}"?',
    'I came across the word "{}". What does it mean?',
    'Please explain the word "{}".',
    'What does the word "{}" mean in English?',
    'Look up "{}" for me.',
    'Tell me what "{}" means.',
)

# Beginnings of words that an answer must not have: violence, sex, religion and the like. Slurs and
# vulgar words are marked in WordNet itself.
LEFT_OUT_WORDS = re.compile(
    r"""\b(?: abort | abus | assassin | blood | bomb | breast | bowel | buttock | christ | church
    | corpse | damn | dead\b | death | devil | die[ds]?\b | divin | drug | drunk | enslav | erotic
    | ethnic | excre | execut | fat\b | feces | genital | god | gyps | hell\b | holy | idiot | insan
    | intercourse | islam | jesus | jew | kill | leer | lord | lust | massacre
    | may\ parents | menstr | murder | muslim
    | naked | nude | obscen | offens | pope | prayer | pregnan | priest | prostitut | queer
    | rac(?:e|ial)\b
    | rape | relig | sadis | savage | scripture | sex | sin\b | slaughter | slave | slur | soul
    | suicid | terroris | tortur | trihydroxy | urin | virgin | vulgar | weapon | worship )""",
    re.VERBOSE | re.IGNORECASE,
)


class Sense(NamedTuple):
    """One word in one synset."""

    word: str
    part: str
    count: int
    gloss: str
    synonyms: tuple[str, ...]
    usable: bool


class Synset(NamedTuple):
    """One line of a data file."""

    topic: int
    kind: str
    words: tuple[tuple[str, int], ...]
    pointers: tuple[tuple[str, int], ...]
    gloss: str


def read_synsets(path: pathlib.Path) -> dict[int, Synset]:
    """All synsets of one data file by offset."""
    synsets = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):  # the licence
            continue
        fields, _, gloss = line.partition(" | ")
        parts = fields.split()
        count = int(parts[3], 16)
        words = tuple((parts[4 + 2 * i], int(parts[5 + 2 * i], 16)) for i in range(count))
        at = 4 + 2 * count
        pointers = tuple(
            (parts[at + 1 + 4 * i], int(parts[at + 2 + 4 * i])) for i in range(int(parts[at]))
        )
        synsets[int(parts[0])] = Synset(int(parts[1]), parts[2], words, pointers, gloss.strip())
    return synsets


def sense_key(synset: Synset, index: int, synsets: Mapping[int, Synset]) -> str:
    """The name of a sense in WordNet's list of counts."""
    word, lex_id = synset.words[index]
    head = ":"
    if synset.kind == "s":
        similar = next(offset for symbol, offset in synset.pointers if symbol == "&")
        head_word, head_id = synsets[similar].words[0]
        head = f"{plain(head_word).lower()}:{head_id:02d}"
    kind = SENSE_TYPES[synset.kind]
    return f"{plain(word).lower()}%{kind}:{synset.topic:02d}:{lex_id:02d}:{head}"


def plain(word: str) -> str:
    """The word without the syntactic marker that some adjectives carry."""
    return re.sub(r"\((a|p|ip)\)$", "", word)


def read_senses(folder: pathlib.Path) -> Iterator[Sense]:
    """Every sense of every word."""
    counts = {}
    for line in (folder / "cntlist.rev").read_text(encoding="utf-8").splitlines():
        key, _, count = line.split()
        counts[key] = int(count)
    for name in FILES:
        synsets = read_synsets(folder / f"data.{name}")
        for synset in synsets.values():
            words = tuple(plain(word) for word, _ in synset.words)
            # ;u marks slang, slurs and vulgar words; ;c the jargon of a field, such as baseball;
            # @i an instance, that is a proper name.
            marked = any(symbol in (";u", ";c", "@i") for symbol, _ in synset.pointers)
            usable = not marked and not (synset.kind == "n" and synset.topic in LEFT_OUT_TOPICS)
            for index, word in enumerate(words):
                others = tuple(other for other in words if other != word)
                count = counts.get(sense_key(synset, index, synsets), 0)
                yield Sense(word, PARTS[synset.kind], count, synset.gloss, others, usable)


def definition(sense: Sense) -> str | None:
    """The first definition of the gloss, if it is short, plain and not circular."""
    text = re.split(r'[;"]', sense.gloss)[0].strip(" .:,")
    if not 18 <= len(text) <= 140 or re.search(r"[^a-z ,'-]", text):
        return None
    stem = sense.word[:5]
    if any(word.startswith(stem) for word in text.split()):
        return None
    return text


def example(sense: Sense) -> str | None:
    """The first example that shows the word and is no quotation from a book."""
    forms = rf"\b(?:{sense.word}|{sense.word[:-1]})(?:s|es|d|ed|ies|ied|ing)?\b"
    for text in re.findall(r'"([^"]+)"(?!\s*-)', sense.gloss):
        text = text.strip(" .")
        shows = re.search(forms, text)
        if shows and 12 <= len(text) <= 70 and not re.search(r"[^A-Za-z ,'?!-]", text):
            return text
    return None


def row(sense: Sense, main: Mapping[str, Sense]) -> dict[str, str] | None:
    """The question and answer for a sense; None if the sense is not good enough."""
    meaning = definition(sense)
    if meaning is None:
        return None
    answer = f"{sense.word} ({sense.part}): {meaning}."
    shown = example(sense)
    if shown is not None:
        answer += f' For example: "{shown}"' + ("" if shown[-1] in "?!" else ".")
    # A synonym helps only if this is what it mainly means too.
    similar = [w for w in sense.synonyms if w in main and main[w].gloss == sense.gloss]
    if similar:
        answer += f" Similar: {', '.join(similar[:2])}."
    if LEFT_OUT_WORDS.search(answer) or not 55 <= len(answer) <= 220:
        return None
    number = int.from_bytes(hashlib.sha256(sense.word.encode()).digest()[:8], "big")
    return {"question": QUESTIONS[number % len(QUESTIONS)].format(sense.word), "answer": answer}


def main_senses(folder: pathlib.Path) -> dict[str, Sense]:
    """The main sense of each common word that has one, by word, the commonest first."""
    by_word = collections.defaultdict(list)
    for sense in read_senses(folder):
        by_word[sense.word.lower()].append(sense)
    chosen = []
    for senses in by_word.values():
        main = max(senses, key=lambda sense: sense.count)
        total = sum(sense.count for sense in senses)
        plain_word = re.fullmatch("[a-z]{4,12}", main.word)
        few = len(senses) <= MAX_SENSES and total >= MIN_TAGS
        if plain_word and few and main.usable and main.count >= MIN_SHARE * total:
            chosen.append(main)
    chosen.sort(key=lambda sense: (-sense.count, sense.word))
    return {sense.word: sense for sense in chosen}


# A synset of each data file (offset, topic, kind, words, pointers, gloss) and counts of senses:
# enough for one row.
SMOKE_FILES = {
    "data.noun": "00000010 07 n 01 gratitude 0 000 | a feeling of thanks for what others did; "
    '"the gratitude that they showed him"  \n',
    "data.verb": "00000010 31 v 01 ponder 0 000 | reflect deeply on a subject  \n",
    "data.adj": "00000010 00 a 01 brisk 0 000 | quick and full of life  \n",
    "data.adv": "00000010 02 r 01 seldom 0 000 | not often at all in any case  \n",
    "cntlist.rev": "gratitude%1:07:00:: 1 9\nponder%2:31:00:: 1 7\n",
}


def smoke() -> None:
    """Makes the set from a folder of four synsets, and checks that a row came out."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for file, text in SMOKE_FILES.items():
            (folder / file).write_text(text, encoding="utf-8")
        write(folder, folder)
        rows = (folder / SET).read_text(encoding="utf-8").splitlines()
    print("\n".join(rows))
    if not any("gratitude (noun): a feeling of thanks" in line for line in rows):
        sys.exit("the row of 'gratitude' is missing")


def write(wordnet: pathlib.Path, out: pathlib.Path) -> None:
    """Writes the set made from the folder `wordnet` into the folder `out`."""
    senses = main_senses(wordnet)
    rows = [made for sense in senses.values() if (made := row(sense, senses)) is not None]
    rows.sort(key=lambda made: made["answer"])
    file = out / SET
    file.write_text("".join(json.dumps(made) + "\n" for made in rows), encoding="utf-8")
    print(f"{file}: {len(rows)} rows, {file.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("wordnet", nargs="?", type=pathlib.Path, help="folder with data.noun ...")
    parser.add_argument("out", nargs="?", type=pathlib.Path, help="folder to write to")
    parser.add_argument("--smoke", action="store_true", help="four synsets")
    arguments = parser.parse_args()
    if arguments.smoke:
        smoke()
    elif arguments.wordnet is None or arguments.out is None:
        parser.error("needs two folders: that of WordNet and that to write to")
    else:
        write(arguments.wordnet, arguments.out)


if __name__ == "__main__":
    main()
