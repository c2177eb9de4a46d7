"""What the README and docs/ point to exists."""

import re

import pytest

from tests.support import documents

NAMES = [page.name for page in documents.PAGES]


@pytest.mark.parametrize("page", documents.PAGES, ids=NAMES)
def test_links_lead_to_files_and_headings(page):
    broken = []
    for link in documents.links(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            broken.append(link)
        elif anchor and anchor not in documents.anchors(target.read_text()):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", documents.PAGES, ids=NAMES)
def test_files_that_are_named_exist(page):
    named = documents.named_files(page.read_text())
    assert not [name for name in named if not (documents.REPO / name).exists()]


def test_every_page_is_linked_from_the_readme():
    readme = (documents.REPO / "README.md").read_text()
    pages = {f"docs/{page.name}" for page in documents.PAGES[1:]}
    assert pages - set(link.partition("#")[0] for link in documents.links(readme)) == set()


def test_the_readme_is_short_and_maps_every_package():
    readme = (documents.REPO / "README.md").read_text()
    assert len(readme.splitlines()) <= 150
    packages = {
        f"purelora/{init.parent.name}" for init in documents.REPO.glob("purelora/*/__init__.py")
    }
    assert packages <= set(documents.links(readme))


def test_the_example_in_python_is_that_of_its_page():
    """That page's is run; the README leaves lines out."""
    example, page = (
        re.search(r"```python\n(.*?)```", (documents.REPO / name).read_text(), re.DOTALL)[1]
        for name in ("README.md", "docs/python.md")
    )
    rest = iter(page.splitlines())
    assert all(line in rest for line in example.splitlines() if line)


def test_a_link_to_nothing_is_noticed():
    assert documents.links("[a](b.md#c) [d](https://e) `f`") == ["b.md#c"]
    assert documents.anchors("# A page\n\n## What `x` does\n") == {"a-page", "what-x-does"}
    assert documents.named_files("`tests/a.py` `/tests/b.py` tests/c.py") == ["tests/a.py"]
