"""The README and the pages of docs/: their commands, and the files that they speak of."""

import pathlib
import re
import shlex
from typing import NamedTuple

REPO = pathlib.Path(__file__).parents[2]
PAGES = (REPO / "README.md", *sorted((REPO / "docs").glob("*.md")))
_STARTS = r"(?:[A-Z_0-9]+=\S+ )*(?:\.venv/bin/)?(?:python3?|pytest|pip|purelora|ruff|mypy)\b"
_FENCED = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(rf"^    ({_STARTS}(?:.*\\\n)*.*)$", re.MULTILINE)
_INLINE = re.compile(rf"(?<!`)`({_STARTS} [^`]*)`(?!`)")


class Command(NamedTuple):
    """A command of a page, as words, without what the shell does."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def commands() -> list[Command]:
    """All commands of all pages, each once, in their order."""
    pages: dict[tuple[str, ...], str] = {}
    for page in PAGES:
        for words in commands_of(page.read_text()):
            pages.setdefault(words, page.name)
    return [Command(name, words) for words, name in pages.items()]


def commands_of(text: str) -> list[tuple[str, ...]]:
    """The commands in blocks of `sh`, in indented blocks and in code within the text.

    Left out are a path into the virtual environment and settings of the environment;
    `purelora train` is given as `python -m purelora.train`.
    """
    blocks = _FENCED.findall(text)
    rest = _FENCED.sub("", text)
    blocks += _INDENTED.findall(rest)
    blocks += [" ".join(code.split()) for code in _INLINE.findall(_INDENTED.sub("", rest))]
    lines = [
        part
        for block in blocks
        for line in re.sub(r"\\\n\s*", " ", block).replace("&&\n", "&& ").splitlines()
        for part in line.split("&&")
    ]
    return [words for line in lines if (words := _words(line))]


def _words(line: str) -> tuple[str, ...]:
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
        del words[0]
    words = [word.removeprefix(".venv/bin/") for word in words]
    if words and words[0] == "purelora":
        words[:2] = ["python", "-m", f"purelora.{words[1]}"]
    return tuple(words)


def links(text: str) -> list[str]:
    """Targets of the links of a page, but for those to other sites."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in targets if not re.match(r"https?:", target)]


def named_files(text: str) -> list[str]:
    """Files of the repository that a page names as code, from the repository's root."""
    # A path of another program or of the reader's own is not in one of these folders.
    pattern = r"`((?:purelora|tests|configs|benchmarks|docs)/[\w./-]+)`"
    return re.findall(pattern, text)


def anchors(text: str) -> set[str]:
    """What can stand after `#` in a link to this page."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
