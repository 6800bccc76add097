import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from aerie.artefacts.prompts import Prompt, read_prompts
from aerie.artefacts.verifier_tokens import read_verifier_tokens
from aerie.errors import BadInput
from aerie.prompts import tally
from aerie.prompts.stage import prepare
from aerie.settings.pipeline import PipelineSettings
from aerie.stages import Events, StageRequest, StageResult

from .conftest import write_lines

SOURCE = {"reader": "ultrachat", "licence": "MIT"}


def chat(identity: str | None, *texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"prompt_id": identity, "messages": messages}


ROWS = [chat(f"id-{i}", f"Add {i} and 3.", f"{i + 3}", "And 4 more?", f"{i + 7}") for i in range(40)]


class Stage:
    """Runs ``prepare`` on rows written to a file."""

    def __init__(
        self,
        tmp_path: Path,
        settings_for: Callable[..., PipelineSettings],
        request_for: Callable[..., StageRequest],
        events: Events,
    ) -> None:
        self.path = tmp_path / "rows.jsonl"
        self._settings_for, self._request_for, self._events = settings_for, request_for, events

    def run(
        self,
        rows: list[Any] | None,
        *,
        dataset: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        source: dict[str, Any] | None = None,
        **request: Any,
    ) -> StageResult:
        if rows is not None:
            write_lines(self.path, rows)
        described = {"source": SOURCE | {"path": self.path} | (source or {}), **(dataset or {})}
        made = self._settings_for({"B6_ultrachat": described}, **(settings or {}))
        self.request = self._request_for(made, "B6_ultrachat", **request)
        return prepare(self.request, self._events)

    def prompts(self, rows: list[Any] | None, **fields: Any) -> list[Prompt]:
        self.run(rows, **fields)
        return read_prompts(self.request.files.dataset("B6_ultrachat").prompts)


@pytest.fixture
def stage(
    tmp_path: Path,
    settings_for: Callable[..., PipelineSettings],
    request_for: Callable[..., StageRequest],
    events: Events,
) -> Stage:
    return Stage(tmp_path, settings_for, request_for, events)


def decode(checkpoint: Path, prompt: Prompt) -> str:
    return AutoTokenizer.from_pretrained(checkpoint).decode(prompt.prompt_ids)


def test_prompts_end_where_the_verifier_starts_to_reason_and_never_hold_the_answer(
    stage: Stage, checkpoint: Path
) -> None:
    row = chat("a", "2+2?", "<think>secret</think>four", "3+3?", "six")
    by_turn = {}
    for seed in range(12):
        (prompt,) = stage.prompts([row], settings={"seed": seed})
        by_turn[prompt.turn] = decode(checkpoint, prompt)

    opening = "<|im_assistant|>assistant<|im_middle|><think>"
    assert by_turn == {
        0: f"<|im_user|>user<|im_middle|>2+2?<|im_end|>{opening}",
        1: f"<|im_user|>user<|im_middle|>2+2?<|im_end|>{opening}</think>four<|im_end|>"
        f"<|im_user|>user<|im_middle|>3+3?<|im_end|>{opening}",
    }


def test_a_source_sorted_otherwise_gives_the_same_prompts_in_the_same_order(stage: Stage) -> None:
    shuffled = random.Random(1).sample(ROWS, len(ROWS))

    prompts = stage.prompts(ROWS)

    assert stage.prompts(shuffled) == prompts
    assert [p.admission_rank for p in prompts] == sorted(p.admission_rank for p in prompts)
    assert len({p.sample_id for p in prompts}) == len(prompts) == 40
    assert {p.split for p in prompts} == {"train", "validation", "benchmark"}


def test_another_seed_gives_another_order_and_the_same_splits(stage: Stage) -> None:
    first, second = stage.prompts(ROWS), stage.prompts(ROWS, settings={"seed": 4})

    assert [p.conversation_id for p in first] != [p.conversation_id for p in second]
    assert {p.conversation_id: p.split for p in first} == {p.conversation_id: p.split for p in second}


def test_an_id_that_two_different_rows_carry_identifies_neither(stage: Stage) -> None:
    twice = [chat("same", "Count up from 1."), chat("same", "Count up from 2."), chat("own", "Count up from 3.")]

    prompts = stage.prompts(twice)

    assert len({p.sample_id for p in prompts}) == 3
    assert [p.sample_id for p in prompts if "same" in p.sample_id] == []
    assert stage.prompts(twice[::-1]) == prompts


def test_equal_prompts_are_kept_once_whatever_their_ids_and_spaces_and_order(stage: Stage) -> None:
    equal = [chat(name, spaces.join(("Sort", "3 2 1."))) for name, spaces in (("a", " "), ("b", "  "), ("c", "\n"))]

    (prompt,) = stage.prompts([*equal, equal[0]])

    assert stage.prompts([equal[2], *equal]) == [prompt]
    manifest = stage.run(None).manifest
    assert manifest is not None
    assert manifest.counts["prompts"] == 1
    assert manifest.counts["set_aside"]["duplicate"] == 3


def test_a_row_that_is_there_twice_keeps_its_own_id(stage: Stage) -> None:
    (prompt,) = stage.prompts([chat("a", "Sort 3 2 1.")] * 2)

    assert prompt.sample_id == "B6_ultrachat-a-t0"


def test_rows_without_an_id_that_begin_alike_share_their_split(stage: Stage) -> None:
    prompts = stage.prompts([chat(None, "Hi", f"Hello {i}", f"Add {i} and 1.") for i in range(12)])

    assert len({p.conversation_id for p in prompts}) == 1
    assert len({p.split for p in prompts}) == 1


def test_one_bad_row_of_every_kind_is_counted_and_never_ends_the_job(stage: Stage, checkpoint: Path) -> None:
    template = checkpoint / "chat_template.jinja"
    refusal = "{%- if messages[0].content == 'Reject me.' -%}{{ raise_exception('no thanks') }}{%- endif -%}"
    template.write_text(refusal + template.read_text())
    bad = [
        chat("e", ""),
        {"prompt_id": "r", "messages": [{"role": "narrator", "content": "x"}]},
        ["not an object"],
        chat("s", "half a pair: \ud800"),
        chat("t", "Reject me."),
        chat("c", "Please print <|im_end|> for me."),
        chat("l", "very " * 300),
    ]

    prompts = stage.prompts(ROWS + bad)

    manifest = stage.run(None).manifest
    assert manifest is not None
    assert manifest.counts["skipped"] == {
        "empty_conversation": 1,
        "unknown_role": 1,
        "not_an_object": 1,
        "not_utf8": 1,
        "template_rejected": 1,
        "control_token_in_text": 1,
        "prompt_too_long": 1,
    }
    assert "rows.jsonl:45" in manifest.counts["skipped_examples"]["template_rejected"][0]
    skipped = {p.skip_reason: p for p in prompts if p.skip_reason}
    assert set(skipped) == {"template_rejected", "control_token_in_text", "prompt_too_long"}
    assert all(p.prompt_ids == [] for p in skipped.values())
    assert manifest.counts["prompts"] == 40 == sum(p.skip_reason is None for p in prompts)


def test_too_many_bad_rows_end_the_job_with_the_most_common_reason_and_no_file(stage: Stage) -> None:
    rows = [*ROWS[:4], *[{"text": "other shape"}] * 5, chat("e", "")]

    with pytest.raises(BadInput, match=r"6 of 10 rows.*0\.5.*missing_field \(5 rows\).*rows\.jsonl:5"):
        stage.run(rows)

    assert not stage.request.files.dataset("B6_ultrachat").prompts.exists()
    assert stage.run(rows, source={"max_skipped_share": 0.6}).reused is False


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_an_empty_file_is_refused(stage: Stage, content: str) -> None:
    stage.path.write_text(content)

    with pytest.raises(BadInput, match=r"no prompt in 0 rows"):
        stage.run(None)


def test_a_conversation_too_long_for_the_context_falls_back_to_an_earlier_turn_that_fits(stage: Stage) -> None:
    turns = [text for i in range(30) for text in (f"Add {i} and 5 to it.", f"That gives {i}.")]
    rows = [chat(f"long-{i}", f"Start with {i}.", "Yes.", *turns) for i in range(30)]

    prompts = stage.prompts(rows)

    assert all(p.skip_reason is None for p in prompts)
    assert max(len(p.prompt_ids) for p in prompts) <= 256 - 16
    assert len({p.turn for p in prompts}) > 3, "turns must be drawn among all that fit, not pile up at the limit"


def test_max_prompts_is_left_to_admission_so_that_raising_it_prepares_nothing_again(stage: Stage) -> None:
    everything = stage.prompts(ROWS)

    assert stage.prompts(ROWS, dataset={"max_prompts": 7}) == everything
    assert stage.run(None, dataset={"max_prompts": 9}).reused is True


def test_the_same_request_has_nothing_to_do_and_a_changed_one_starts_again(
    stage: Stage, checkpoint: Path, told: Callable[[str], list[str]]
) -> None:
    assert stage.run(ROWS).reused is False
    assert stage.run(None).reused is True
    assert told("progress")[-1].startswith("nothing to do")
    assert stage.run(None, settings={"serving": {"context_length": 256, "mem_fraction_static": 0.5}}).reused is True

    assert stage.run(None, force=True).reused is False
    assert stage.run(None, settings={"seed": 9}).reused is False
    assert stage.run(None, settings={"serving": {"context_length": 255}}).reused is False
    assert stage.run(None, settings={"splits": {"validation": 0.1, "benchmark": 0.1}}).reused is False
    assert stage.run(ROWS[:-1]).reused is False
    template = checkpoint / "chat_template.jinja"
    template.write_text(template.read_text() + "\n")
    assert stage.run(None).reused is False


def test_the_manifest_adds_up_and_its_outputs_are_whole(stage: Stage) -> None:
    result = stage.run(ROWS)

    assert result.manifest is not None
    counts = result.manifest.counts
    files = stage.request.files.dataset("B6_ultrachat")
    prompts = read_prompts(files.prompts)
    assert sum(counts["prompts_by_split"].values()) == counts["prompts"] == len(prompts)
    assert counts["prompt_tokens"] == sum(len(p.prompt_ids) for p in prompts)
    assert {Path(output.uri).name for output in result.manifest.outputs} == {"prompts.parquet", "verifier.json"}
    assert read_verifier_tokens(files.verifier_tokens).token_ids["<think>"] == prompts[0].prompt_ids[-1]
    assert sorted(p.name for p in files.folder.iterdir()) == [
        "prepare.manifest.json",
        "prompts.parquet",
        "verifier.json",
    ]


def test_a_long_job_reports_where_it_is(
    stage: Stage, told: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tally, "PROGRESS_SECONDS", 0.0)

    stage.run(ROWS)

    assert any(message.startswith("read 17 rows") for message in told("progress"))
    assert any(message.startswith("rendered 17 of 40") for message in told("progress"))


def test_tool_calls_are_rendered_in_the_verifiers_own_format(
    tmp_path: Path,
    checkpoint: Path,
    settings_for: Callable[..., PipelineSettings],
    request_for: Callable[..., StageRequest],
    events: Events,
) -> None:
    system = 'SYSTEM: Use them if required -\n{"name": "add", "description": "Add"}\n'
    told_chat = (
        'USER: Add it\n\n\nASSISTANT: <functioncall> {"name": "add", "arguments": \'{"n": 1}\'} <|endoftext|>\n\n\n'
        'FUNCTION RESPONSE: {"ok": 1}'
    )
    path = write_lines(tmp_path / "glaive.jsonl", [{"system": system, "chat": told_chat}])
    settings = settings_for({"B1_glaive": {"source": {"reader": "glaive", "path": path, "licence": "MIT"}}}, seed=0)
    request = request_for(settings, "B1_glaive")
    prompts = []
    for seed in range(8):
        request = request_for(settings.model_copy(update={"seed": seed}), "B1_glaive")
        prepare(request, events)
        prompts += read_prompts(request.files.dataset("B1_glaive").prompts)
    prompt = next(prompt for prompt in prompts if prompt.turn == 1)

    assert prompt.tools is not None
    assert json.loads(prompt.tools)[0]["function"]["name"] == "add"
    text = decode(checkpoint, prompt)
    assert (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"n": 1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
        '<|im_system|>tool<|im_middle|>## Return of functions.add:0\n{"ok": 1}<|im_end|>'
    ) in text
    assert "functioncall" not in text
