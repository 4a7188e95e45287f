"""Names of models: which form each text is, and that none escapes the store."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceError, InvalidRequest, ModelNotFound
from headrace.formats.catalogue import CATALOGUE, DEFAULT_MODEL, find
from headrace.formats.names import (
    CatalogueName,
    HubName,
    PathName,
    WheelName,
    is_name_like,
    parse_name,
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("smollm2:135m", "smollm2:135m"),
        ("smollm2", "smollm2:135m"),
        ("SmolLM2:135M", "smollm2:135m"),
        ("gemma3", "gemma3:270m"),
    ],
)
def test_catalogue_names(text: str, name: str) -> None:
    found = parse_name(text)
    assert isinstance(found, CatalogueName)
    assert found.id == name


def test_the_default_is_in_the_catalogue() -> None:
    assert find(DEFAULT_MODEL) is not None


def test_catalogue_entries_are_distinct_and_add_up() -> None:
    slugs = {CatalogueName(entry).slug for entry in CATALOGUE}
    assert len(slugs) == len(CATALOGUE)
    for entry in CATALOGUE:
        assert sum(part.num_bytes for part in entry.parts) == entry.num_bytes
        assert all(len(part.sha256) == 64 for part in entry.parts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf:owner/repo", HubName("owner/repo", None)),
        ("hf:owner/repo:Q4_K_M", HubName("owner/repo", "Q4_K_M")),
        ("hf:owner/re.po_1:sub/a.gguf", HubName("owner/re.po_1", "sub/a.gguf")),
        ("pypi:some-thing==1.2.3", WheelName("some-thing", "1.2.3", None)),
        ("pypi:Some_Thing==1.2", WheelName("some-thing", "1.2", None)),
        ("pypi:a==1:x/y.gguf", WheelName("a", "1", "x/y.gguf")),
    ],
)
def test_remote_names(text: str, expected: HubName | WheelName) -> None:
    assert parse_name(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "hf:",
        "hf:repo",
        "hf:../etc",
        "hf:a/..",
        "hf:a/b:../../x.gguf",
        "hf:a/b:/etc/x.gguf",
        "hf:a/b/c",
        "hf:a/b c",
        "hf:-x/y",
        "pypi:",
        "pypi:thing",
        "pypi:thing>=1",
        "pypi:thing==",
        "pypi:thing==1.*",
        "pypi:--index-url==1",
        "pypi:thing==1 --pre",
        "pypi:thing==1:../x",
        "pypi:th\u00efng==1",
    ],
)
def test_malformed_names_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"hf:owner/repo|pypi:package==version"):
        parse_name(text)


def test_paths(tmp_path: Path) -> None:
    file = tmp_path / "a model.gguf"
    file.touch()
    assert parse_name(str(file)) == PathName(file)
    assert parse_name(str(tmp_path)) == PathName(tmp_path)


def test_a_catalogue_name_wins_over_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").touch()
    assert isinstance(parse_name("smollm2"), CatalogueName)
    assert parse_name("./smollm2") == PathName(Path("smollm2"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("smollm3", "did you mean smollm2:135m"),
        ("gemma:270m", "did you mean gemma3:270m"),
        ("gemma", "did you mean gemma3:270m"),
        ("nothing-like-it", "a model is a name of the catalogue"),
        ("./none.gguf", "no file or folder './none.gguf'"),
        ("models/none", "no file or folder"),
        ("", "no model"),
        ("x" * 5000, "no model"),
        ("a\0b", "no model"),
    ],
)
def test_unknown_names_list_what_there_is(text: str, said: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        parse_name(text)
    assert said in caught.value.message
    assert "hf:owner/repo" in caught.value.message


def test_installed_models_are_near_matches() -> None:
    with pytest.raises(ModelNotFound, match=r"did you mean hf:owner/repo\?"):
        parse_name("owner/repo".replace("/", "-"), ["hf:owner/repo"])


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        ("Why is the sky blue?", False),
        ("Why?", False),
        ("hello", False),
        ("Translate: cat", False),
        ("", False),
        ("small", False),
        ("smollm3", True),
        ("gemma", True),
        ("llama:8b", True),
        ("hf:x/y", True),
        ("models/x", True),
        ("x.gguf", True),
        ("X.GGUF", True),
        ("word\nword", False),
        ("/" * 6000, True),
        ("y" * 6000, False),
    ],
)
def test_what_looks_like_a_name(text: str, is_name: bool) -> None:
    assert is_name_like(text) is is_name


def test_an_existing_path_is_a_name_even_with_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "my models"
    folder.mkdir()
    assert is_name_like(str(folder))


_TEXT = st.text(max_size=40)
_PREFIXED = st.builds(str.__add__, st.sampled_from(["hf:", "pypi:", "hf:a/", "pypi:a==1:"]), _TEXT)


@given(st.one_of(_TEXT, _PREFIXED))
def test_any_text_is_a_safe_folder_or_an_error(text: str) -> None:
    try:
        found = parse_name(text)
    except HeadraceError:
        return
    if not isinstance(found, PathName):
        assert found.slug == Path(found.slug).name
        assert not found.slug.startswith(".")


@given(_PREFIXED, _PREFIXED)
def test_different_models_have_different_folders(first: str, second: str) -> None:
    try:
        a, b = parse_name(first), parse_name(second)
    except HeadraceError:
        return
    if not isinstance(a, PathName) and not isinstance(b, PathName):
        assert (a.id == b.id) == (a.slug == b.slug)
