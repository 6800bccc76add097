"""One sample of an edition as a person sees it."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from aerie.artefacts.imported import ImportedRow, write_imported
from aerie.artefacts.layout import EditionFiles
from aerie.boundary.showing import find_sample, lines_of
from aerie.errors import BadInput
from aerie.prompts.checkpoint import Verifier

from .test_stage import Dataset, checkpoint, verifier  # noqa: F401 - fixtures

ANSWER = "I add.</think>It is 4.<|im_end|>"


@pytest.fixture
def dataset(tmp_path: Path, checkpoint: Path, verifier: Verifier) -> Dataset:  # noqa: F811
    return Dataset(tmp_path, checkpoint, verifier)


def shown(dataset: Dataset, sample_id: str, *, key: str | None = None, colour: bool = False) -> str:
    request = dataset.request()
    files = EditionFiles(request.data_root, request.edition)
    found = find_sample(sample_id, files=files, settings=request.settings, dataset=key)
    console = Console(
        file=io.StringIO(), soft_wrap=True, highlight=False, markup=False, emoji=False,
        force_terminal=colour, color_system="standard" if colour else None,
    )  # fmt: skip
    for line in lines_of(found):
        console.print(line)
    text = console.file
    assert isinstance(text, io.StringIO)
    return text.getvalue()


def test_parts_are_named_with_what_is_trained_and_special_tokens_are_visible(dataset: Dataset) -> None:
    dataset.answer(dataset.prompt("s1", "What is 2 + 2?"), ANSWER)
    lines = shown(dataset, "s1").splitlines()
    assert lines[0] == "sample s1: main/B1_glaive, train"
    assert lines[1].startswith("kept, ")
    named = {line.split(", ")[0]: lines[number + 1] for number, line in enumerate(lines) if ", tokens " in line}
    assert list(named) == ["prompt", "reasoning", "boundary", "answer", "end"]
    assert named["prompt"].endswith("<think>") and "What is 2 + 2?" in named["prompt"]
    assert (named["reasoning"], named["boundary"], named["end"]) == ("I add.", "</think>", "<|im_end|>")
    trained = {line.split(", ")[0] for line in lines if line.endswith(", trained")}
    assert trained == {"reasoning", "boundary", "answer", "end"}


def test_what_follows_the_end_is_shown_as_not_trained_with_its_reason(dataset: Dataset) -> None:
    dataset.answer(dataset.prompt("s1", "?"), ANSWER + "More.")
    text = shown(dataset, "s1")
    assert "quarantined" in text and "tokens_after_end at " in text and "none trained" in text
    (after,) = [line for line in text.splitlines() if line.startswith("after_end, ")]
    assert not after.endswith("trained")


def test_text_of_a_sample_is_text_and_its_escapes_are_written_out(dataset: Dataset) -> None:
    dataset.answer(dataset.prompt("s1", "[red]\x1b[31m\x07[/red] :smile:"), ANSWER)
    plain = shown(dataset, "s1")
    assert "[red]<U+001B>[31m<U+0007>[/red] :smile:" in plain and "\x1b" not in plain
    coloured = shown(dataset, "s1", colour=True)
    assert "\x1b[31m" not in coloured and "<U+001B>[31m" in coloured


def test_trained_parts_are_underlined_and_the_prompt_is_not(dataset: Dataset) -> None:
    dataset.answer(dataset.prompt("s1", "Why?"), ANSWER)
    lines = shown(dataset, "s1", colour=True).splitlines()
    (answer,) = [line for line in lines if "It is 4." in line]
    (prompt,) = [line for line in lines if "Why?" in line]
    assert "\x1b[4;" in answer and "\x1b[4;" not in prompt


def test_imported_row_is_found_without_naming_its_data_set(
    tmp_path: Path,
    checkpoint: Path,  # noqa: F811
    verifier: Verifier,  # noqa: F811
) -> None:
    dataset = Dataset(tmp_path, checkpoint, verifier, key="A1")
    ids = verifier.tokenizer.encode(ANSWER, add_special_tokens=False)
    mask = [0, *[1] * (len(ids) - 1)]
    write_imported(dataset.files.imported, [ImportedRow("a1", "c", "train", list(ids), mask)])
    assert "sample a1: main/A1, train" in shown(dataset, "a1")


def test_unknown_sample_is_told_with_where_it_was_looked_for(dataset: Dataset) -> None:
    dataset.answer(dataset.prompt("s1", "?"), ANSWER)
    with pytest.raises(BadInput, match="no sample 'other': looked in B1_glaive"):
        shown(dataset, "other")
    dataset.prompt("s2", "Later?")
    with pytest.raises(BadInput, match="sample s2 has no response"):
        shown(dataset, "s2")
