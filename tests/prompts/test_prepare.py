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
from aerie.prompts import candidates, parts, tally
from aerie.prompts import stage as stage_module
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


@pytest.mark.parametrize(("turns", "expected"), [("first", {0}), ("last", {1}), ("every", {0, 1})])
def test_the_settings_say_which_answers_of_a_conversation_become_prompts(
    stage: Stage, turns: str, expected: set[int]
) -> None:
    prompts = stage.prompts(ROWS, source={"turns": turns})

    by_conversation: dict[str, set[int]] = {}
    for prompt in prompts:
        by_conversation.setdefault(prompt.conversation_id, set()).add(prompt.turn)
    assert len(by_conversation) == 40
    assert set(map(frozenset, by_conversation.values())) == {frozenset(expected)}
    assert len({prompt.sample_id for prompt in prompts}) == len(prompts) == 40 * len(expected)
    assert len({(prompt.conversation_id, prompt.split) for prompt in prompts}) == 40


def in_parts(monkeypatch: pytest.MonkeyPatch, size: int, workers: int) -> None:
    monkeypatch.setattr(candidates, "PART_CANDIDATES", size)
    monkeypatch.setattr(parts, "PART_CANDIDATES", size)
    monkeypatch.setattr(stage_module, "processors", lambda: workers)


@pytest.mark.slow
def test_any_number_of_processes_makes_the_same_files(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are processes of their own, which know nothing of this test's patches: parts have the usual size."""
    rows = [chat(None, f"Add {i} and 5.") for i in range(2 * candidates.PART_CANDIDATES + 50)]
    digests = []
    for workers in (1, 2):
        monkeypatch.setattr(stage_module, "processors", lambda workers=workers: workers)
        manifest = stage.run(rows, force=True).manifest
        assert manifest is not None
        digests.append([output.sha256 for output in manifest.outputs])

    assert manifest.counts["prompts"] == len(rows)
    assert digests[0] == digests[1]


def test_an_interrupted_run_goes_on_where_it_was_and_makes_the_same_prompts(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts(monkeypatch, size=10, workers=1)
    rendered: list[int] = []
    write = parts.PartRenderer.write

    def interrupted(self: parts.PartRenderer, number: int) -> None:
        if len(rendered) == 2:
            raise KeyboardInterrupt
        rendered.append(number)
        write(self, number)

    monkeypatch.setattr(parts.PartRenderer, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stage.run(ROWS)
    assert not stage.request.files.dataset("B6_ultrachat").prompts.exists()

    def resumed(self: parts.PartRenderer, number: int) -> None:
        rendered.append(number)
        write(self, number)

    monkeypatch.setattr(parts.PartRenderer, "write", resumed)
    monkeypatch.setattr(stage_module, "collect", lambda *_, **__: pytest.fail("the source was read again"))
    prompts = stage.prompts(None)
    assert rendered == [0, 1, 2, 3]

    monkeypatch.undo()
    assert stage.prompts(None, force=True) == prompts


def test_unfinished_work_of_other_settings_is_not_taken_up(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(stage_module, "write_prompts", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            stage.run(ROWS)

    other = stage.prompts(None, settings={"seed": 4})

    assert other == stage.prompts(None, settings={"seed": 4}, force=True)
    assert other != stage.prompts(None)


def test_prompts_of_named_benchmarks_are_left_out_and_counted(stage: Stage, tmp_path: Path) -> None:
    long = "A train leaves the station at noon and travels at sixty miles per hour toward the next town."
    benchmarks = {
        "mt_bench.jsonl": [{"question_id": 1, "turns": ["Compose a BLOG post!", long], "reference": ["Add 3 and 3."]}],
        "gsm8k.jsonl": [{"question": "Why, though?", "answer": "Add 4 and 3."}],
        "bfcl.jsonl": [{"question": [[{"role": "user", "content": "Rain in Ulm?"}]], "function": []}],
    }
    for name, rows in benchmarks.items():
        write_lines(tmp_path / name, rows)
    contaminated = [
        chat("whole", "compose a blog  post"),
        chat("nested", "Rain in Ulm"),
        chat("run", f"Solve this. {long.replace('town', 'city').upper()} How far is it?"),
        chat("later", "Hello", "Hi", "Why though"),
    ]
    clean = [chat("part", "Compose a blog post about trains"), chat("answer", "A train leaves the station at noon")]
    named = [tmp_path / name for name in benchmarks]

    prompts = stage.prompts([*ROWS, *contaminated, *clean], settings={"decontaminate": named}, source={"turns": "last"})

    skipped = {prompt.conversation_id for prompt in prompts if prompt.skip_reason == "contaminated"}
    assert skipped == {"whole", "nested", "run", "later"}
    assert not any(prompt.prompt_ids for prompt in prompts if prompt.skip_reason)
    manifest = stage.run(None, settings={"decontaminate": named}, source={"turns": "last"}).manifest
    assert manifest is not None
    assert manifest.counts["set_aside"]["contaminated"] == 4
    assert "mt_bench.jsonl:1" in " ".join(manifest.counts["skipped_examples"]["contaminated"])
    assert manifest.counts["prompts"] == 42


def test_a_changed_or_wrong_file_of_benchmarks_is_noticed(stage: Stage, tmp_path: Path) -> None:
    named = write_lines(tmp_path / "mine.jsonl", [{"prompt": "Add 3 and 3."}])
    assert stage.run(ROWS, settings={"decontaminate": [named]}).reused is False
    assert stage.run(None, settings={"decontaminate": [named]}).reused is True

    write_lines(named, [{"prompt": "Add 5 and 3."}])
    assert stage.run(None, settings={"decontaminate": [named]}).reused is False

    write_lines(named, [{"prompt": "Add 5 and 3."}, {"task": "x"}])
    with pytest.raises(BadInput, match=r"mine\.jsonl:2: expected a prompt in one of the columns .*the row has task"):
        stage.run(None, settings={"decontaminate": [named]})
    with pytest.raises(BadInput, match="no_such"):
        stage.run(None, settings={"decontaminate": [tmp_path / "no_such.jsonl"]})


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
    assert {Path(output.uri).name for output in result.manifest.outputs} == {
        "prompts.parquet",
        "prompt_hashes.parquet",
        "verifier.json",
    }
    assert read_verifier_tokens(files.verifier_tokens).token_ids["<think>"] == prompts[0].prompt_ids[-1]
    assert sorted(p.name for p in files.folder.iterdir()) == [
        "prepare.manifest.json",
        "prompt_hashes.parquet",
        "prompts.parquet",
        "verifier.json",
    ]


def test_a_long_job_reports_where_it_is(
    stage: Stage, told: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tally, "PROGRESS_SECONDS", 0.0)

    stage.run(ROWS)

    assert any(message.startswith("read 17 rows") for message in told("progress"))
    assert "rendered 40 of 40 prompts" in told("progress")
    assert any(message.startswith("took 17 prompts") for message in told("progress"))


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
