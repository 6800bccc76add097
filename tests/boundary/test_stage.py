"""Stage validate on files as its neighbours write them, with the demo's own tokenizer."""

import json
import shutil
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aerie.artefacts.imported import ImportedRow, write_imported
from aerie.artefacts.previews import iterate_previews
from aerie.artefacts.prompts import Prompt, write_prompts
from aerie.artefacts.response_log import Response, ResponseLog, iterate_responses, log_files, prompt_sha256
from aerie.artefacts.samples import iterate_samples, iterate_verdicts
from aerie.artefacts.superseded import Superseded, add_superseded
from aerie.artefacts.verifier_tokens import write_verifier_tokens
from aerie.boundary.decoding import decode_file
from aerie.boundary.files import judge_file
from aerie.boundary.rows import JudgedRow
from aerie.boundary.stage import PreviewChooser, validate
from aerie.errors import BadInput, Failed
from aerie.prompts.checkpoint import Verifier, load_verifier
from aerie.settings.pipeline import PipelineSettings, VerifierSettings, is_tokenised
from aerie.stages import Events, StageRequest

from ..checkpoints import make_checkpoint
from .families import TINY_VERIFIER, family

TOOLS = json.dumps([{"name": "convert", "parameters": {"type": "object", "required": ["value"]}}])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_VERIFIER / name, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 1024}))
    return folder


@pytest.fixture(scope="module")
def verifier(checkpoint: Path) -> Verifier:
    return load_verifier(VerifierSettings(path=checkpoint, profile="demo"))


class Dataset:
    """One data set of one edition, up to ``validate``."""

    def __init__(
        self, root: Path, checkpoint: Path, verifier: Verifier, key: str = "B1_glaive", profile: str = "demo"
    ) -> None:
        self.root, self.checkpoint, self.key, self.profile = root, checkpoint, key, profile
        self.tokenizer = verifier.tokenizer
        self.prompts: list[Prompt] = []
        self.files = self.request().files.dataset(key)
        self.files.folder.mkdir(parents=True)
        write_verifier_tokens(self.files.verifier_tokens, verifier.tokens)

    def request(self, *, force: bool = False, share: float = 0.9, **dataset: Any) -> StageRequest:
        kind = "tokenised" if is_tokenised(self.key) else "generated"
        source = {"reader": "any", "path": "x", "licence": "MIT", "revision": "r7"}
        settings = {
            "name": "test",
            "verifier": {"path": self.checkpoint, "profile": self.profile},
            "serving": {"context_length": 512},
            "datasets": {self.key: {"source": source, "kind": kind, **dataset}},
            "generation": {"maximum_quarantine_share": share},
            "corpus": {"maximum_length": 512},
            "vocabulary": {"size": 64},
            "training": {"epochs": 1, "sequence_length": 512},
            "publish": {"folder": self.root / "published"},
        }
        return StageRequest(
            settings=PipelineSettings.model_validate(settings),
            data_root=self.root,
            server_folder=self.root / "server",
            edition="main",
            dataset=self.key,
            run_id="r",
            force=force,
        )

    def validate(self, **options: Any) -> Any:
        return validate(self.request(**options), Events(self.root / "events.jsonl"))

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.root / "events.jsonl").read_text().splitlines()]

    def prompt(self, sample_id: str, question: str, *, split: Any = "train", tools: str | None = None) -> Prompt:
        ids = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False, thinking=True
        )
        prompt = Prompt(sample_id, f"c-{sample_id}", 0, split, list(ids), tools, len(self.prompts), None)
        self.prompts.append(prompt)
        write_prompts(self.files.prompts, self.prompts)
        return prompt

    def answer(self, prompt: Prompt, text: str, *, attempt: int = 1, **fields: Any) -> None:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        response = Response(
            **{
                "sample_id": prompt.sample_id,
                "attempt": attempt,
                "prompt_sha256": prompt_sha256(prompt.prompt_ids),
                "prompt_tokens": len(prompt.prompt_ids),
                "completion_tokens": len(ids),
                "max_new_tokens": 320,
                "finish_reason": {"type": "stop", "matched": ids[-1] if ids else None},
                "launch_token": "t",
                "meta_info": {},
                "output_ids": tuple(ids),
                **fields,
            }
        )
        with ResponseLog(self.files.responses) as log:
            log.append(response)


@pytest.fixture
def dataset(tmp_path: Path, checkpoint: Path, verifier: Verifier) -> Dataset:
    return Dataset(tmp_path, checkpoint, verifier)


def call(arguments: str) -> str:
    return (
        "I convert.</think>Here.<|tool_calls_section_begin|><|tool_call_begin|>functions.convert:0"
        f"<|tool_call_argument_begin|>{arguments}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
    )


def mixed(dataset: Dataset) -> None:
    """Two good rows, one of them regenerated, two flagged, two corrupt, one prompt without a response."""
    good = dataset.prompt("good", "count to three")
    dataset.answer(good, "one, two</think>three<|im_end|>")
    regenerated = dataset.prompt("regenerated", "count to two", split="validation")
    dataset.answer(regenerated, "one<|im_end|>")
    dataset.answer(regenerated, "one</think>two<|im_end|>", attempt=2)
    tool = dataset.prompt("tool", "convert 3 m", tools=TOOLS)
    dataset.answer(tool, call('{"value": '))
    cut = dataset.prompt("cut", "think long")
    dataset.answer(cut, "one, two, three", finish_reason={"type": "length", "length": 5})
    dataset.answer(dataset.prompt("unclosed", "say no"), "no<|im_end|>")
    dataset.answer(
        dataset.prompt("other_prompt", "say yes"), "a</think>b<|im_end|>", prompt_sha256=prompt_sha256([1, 2, 3])
    )
    dataset.prompt("waiting", "not generated yet")


def test_samples_are_prompt_and_response_with_the_latest_attempt_and_lineage(dataset: Dataset) -> None:
    mixed(dataset)
    dataset.validate()
    samples = {sample.sample_id: sample for sample in iterate_samples(dataset.files.samples)}
    assert set(samples) == {"good", "regenerated", "tool", "cut"}
    row = samples["regenerated"]
    prompt = dataset.prompts[1]
    response = dataset.tokenizer.encode("one</think>two<|im_end|>", add_special_tokens=False)
    assert row.input_ids == [*prompt.prompt_ids, *response]
    assert row.loss_mask == [0] * len(prompt.prompt_ids) + [1] * len(response)
    assert (row.prompt_tokens, row.response_tokens) == (len(prompt.prompt_ids), len(response))
    assert (row.split, row.conversation_id, row.dataset) == ("validation", "c-regenerated", "B1_glaive")
    assert (row.source_revision, row.edition, row.licence) == ("r7", "main", "MIT")
    assert samples["tool"].flags == ["tool_arguments_not_json"]


def test_every_response_has_a_verdict_and_the_manifest_counts_them(dataset: Dataset) -> None:
    mixed(dataset)
    manifest = dataset.validate().manifest
    verdicts = {row.sample_id: row for row in iterate_verdicts(dataset.files.verdicts)}
    assert {name: (row.reasons, row.flags) for name, row in verdicts.items()} == {
        "good": ([], []),
        "regenerated": ([], []),
        "tool": ([], ["tool_arguments_not_json"]),
        "cut": ([], ["truncated_in_reasoning"]),
        "unclosed": (["no_close", "empty_answer"], []),
        "other_prompt": (["prompt_mismatch"], []),
    }
    assert verdicts["unclosed"].positions["no_close"] == [verdicts["unclosed"].completion_tokens - 1]
    kept = list(iterate_samples(dataset.files.samples))
    counts = manifest.counts
    assert (counts["rows"], counts["kept"], counts["quarantined"], counts["flagged"]) == (6, 4, 2, 2)
    assert counts["reasons"] == {"no_close": 1, "empty_answer": 1, "prompt_mismatch": 1}
    assert counts["response_tokens"] == sum(sum(row.loss_mask) for row in kept)
    assert (counts["reasoning_rows"], counts["reasoning_share"]) == (4, 1.0)
    assert counts["splits"] == {"train": 3, "validation": 1}
    assert "4 of 6 rows kept, 2 quarantined" in dataset.events[-1]["message"]


def test_a_response_that_was_asked_for_again_is_judged_no_more(dataset: Dataset) -> None:
    mixed(dataset)
    dataset.validate()
    asked = Superseded(sample_id="cut", attempt=1, reasons=("truncated_in_reasoning",), asked_at=datetime.now(UTC))
    add_superseded(dataset.files.responses, [asked])
    result = dataset.validate()
    assert not result.reused and (result.manifest.counts["rows"], result.manifest.counts["kept"]) == (5, 3)
    assert "cut" not in {row.sample_id for row in iterate_verdicts(dataset.files.verdicts)}


def test_every_version_of_a_sample_can_be_decoded_in_the_order_asked_for(dataset: Dataset) -> None:
    mixed(dataset)
    versions = {
        response.attempt: response
        for response in iterate_responses(dataset.files.responses)
        if response.sample_id == "regenerated"
    }
    request, asked, decoded = (dataset.root / name for name in ("request.json", "asked.jsonl", "decoded.jsonl"))
    request.write_text(dataset.request().model_dump_json())
    asked.write_text("".join(f"{versions[attempt].model_dump_json()}\n" for attempt in (2, 1)))
    decode_file(request, asked, decoded)
    shown = [(preview.verdict, [text for kind, text in preview.spans if kind != "prompt"]) for preview in
             iterate_previews(decoded)]  # fmt: skip
    assert shown == [("kept", ["one", "</think>", "two", "<|im_end|>"]), ("quarantined", ["one", "<|im_end|>"])]


def test_responses_of_a_family_whose_tags_are_spelled_are_decoded_too(tmp_path: Path) -> None:
    name = "deepseek_v3_0324"
    checkpoint = make_checkpoint(tmp_path / "checkpoint", name)
    verifier = load_verifier(VerifierSettings(path=checkpoint, profile=name))
    dataset, spoken = Dataset(tmp_path, checkpoint, verifier, profile=name), family(name)
    prompt = Prompt("a", "c-a", 0, "train", spoken.prompt, None, 0, None)
    write_prompts(dataset.files.prompts, [prompt])
    ids = spoken.said([300, 301], [302])
    dataset.answer(prompt, "", output_ids=tuple(ids), completion_tokens=len(ids), finish_reason={"type": "stop"})
    request, asked, decoded = (tmp_path / name for name in ("request.json", "asked.jsonl", "decoded.jsonl"))
    request.write_text(dataset.request().model_dump_json())
    asked.write_text(next(iterate_responses(dataset.files.responses)).model_dump_json() + "\n")
    decode_file(request, asked, decoded)
    (preview,) = iterate_previews(decoded)
    assert (preview.verdict, preview.reasoning_tokens) == ("kept", 2)


def test_previews_show_boundary_and_tools_as_text(dataset: Dataset) -> None:
    mixed(dataset)
    dataset.validate()
    previews = {preview.sample_id: preview for preview in iterate_previews(dataset.files.previews)}
    assert set(previews) == {"good", "regenerated", "tool", "cut", "unclosed", "other_prompt"}
    spans = [(kind, text) for kind, text in previews["tool"].spans if kind != "prompt"]
    assert spans == [
        ("reasoning", "I convert."),
        ("boundary", "</think>"),
        ("answer", "Here."),
        ("tool", "<|tool_calls_section_begin|>"),
        ("tool", "<|tool_call_begin|>"),
        ("tool_id", "functions.convert:0"),
        ("tool", "<|tool_call_argument_begin|>"),
        ("tool_arguments", '{"value": '),
        ("tool", "<|tool_call_end|>"),
        ("tool", "<|tool_calls_section_end|>"),
        ("end", "<|im_end|>"),
    ]
    assert previews["tool"].spans[0] == ("prompt", dataset.tokenizer.decode(dataset.prompts[2].prompt_ids))


def test_second_run_has_nothing_to_do_until_log_or_policy_change(dataset: Dataset) -> None:
    mixed(dataset)
    first = dataset.validate()
    assert dataset.validate().reused
    assert dataset.events[-1]["message"].startswith("nothing to do")
    assert not dataset.validate(force=True).reused
    dropped = dataset.validate(drop_flags=["tool_arguments_not_json"])
    assert not dropped.reused
    assert dropped.manifest.counts["reasons"]["policy:tool_arguments_not_json"] == 1
    assert dropped.manifest.counts["kept"] == first.manifest.counts["kept"] - 1
    dataset.answer(dataset.prompts[-1], "a</think>b<|im_end|>")
    assert dataset.validate().manifest.counts["rows"] == 7


def test_rows_of_sealed_segments_are_judged_too_and_a_damaged_segment_is_refused(dataset: Dataset) -> None:
    mixed(dataset)
    with ResponseLog(dataset.files.responses, segment_bytes=10):
        segment, live = log_files(dataset.files.responses)
    assert live.stat().st_size == 0
    first = dataset.validate()
    assert first.manifest.counts["rows"] == 6
    assert segment.as_uri() in {source.uri for source in first.manifest.inputs}
    assert dataset.validate().reused
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 4
    segment.write_bytes(data)
    with pytest.raises(Failed, match=rf"{segment.name}: the row at byte \d+.*run generate again"):
        dataset.validate()


def test_too_many_quarantined_rows_fail_with_reasons_and_leave_no_manifest(dataset: Dataset) -> None:
    mixed(dataset)
    dataset.validate()
    with pytest.raises(Failed, match=r"2 of 6 rows are quarantined \(33.3%\).*no_close 1"):
        dataset.validate(share=0.3, force=True)
    assert [event["type"] for event in dataset.events[-2:]] == ["judged", "alert"]
    assert not dataset.files.manifest("validate").exists()
    assert len(list(iterate_verdicts(dataset.files.verdicts))) == 6


def test_a_stricter_share_is_applied_to_an_earlier_result(dataset: Dataset) -> None:
    mixed(dataset)
    dataset.validate()
    with pytest.raises(Failed, match="maximum_quarantine_share"):
        dataset.validate(share=0.3)


def test_empty_log_is_a_failure_not_an_empty_data_set(dataset: Dataset) -> None:
    dataset.prompt("waiting", "not generated yet")
    dataset.files.responses.touch()
    with pytest.raises(Failed, match="holds no row"):
        dataset.validate()


def test_another_tokenizer_than_the_prompts_were_made_with_is_refused(dataset: Dataset, verifier: Verifier) -> None:
    mixed(dataset)
    other = verifier.tokens.model_copy(update={"tokenizer_sha256": "0" * 64})
    write_verifier_tokens(dataset.files.verifier_tokens, other)
    with pytest.raises(BadInput, match="another tokenizer"):
        dataset.validate()


def test_imported_rows_are_judged_segment_by_segment(tmp_path: Path, checkpoint: Path, verifier: Verifier) -> None:
    dataset = Dataset(tmp_path, checkpoint, verifier, key="A1")
    encode = lambda text: verifier.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    head = encode("<|im_user|>user<|im_middle|>count<|im_end|><|im_assistant|>assistant<|im_middle|><think>")
    good, bad = encode("one</think>two<|im_end|>"), encode("one<|im_end|>")

    def row(name: str, *responses: list[int]) -> ImportedRow:
        ids = [i for response in responses for i in (*head, *response)]
        mask = [bit for response in responses for bit in (*[0] * len(head), *[1] * len(response))]
        return ImportedRow(name, name, "train", ids, mask)

    write_imported(dataset.files.imported, [row("two", good, good), row("second_bad", good, bad)])
    manifest = dataset.validate(kind="tokenised").manifest
    (kept,) = iterate_samples(dataset.files.samples)
    assert (kept.sample_id, kept.response_tokens, kept.prompt_tokens) == ("two", 2 * len(good), 2 * len(head))
    assert kept.loss_mask == row("two", good, good).loss_mask
    assert manifest.counts["reasons"] == {"no_close": 1, "empty_answer": 1}


def test_previews_are_few_and_do_not_follow_the_order_in_which_answers_finish() -> None:
    f = family("demo")
    verdict = f.judge([301, f.close, 302, f.end])
    nothing = np.empty(0, np.int8)

    def chosen(order: Iterable[int]) -> list[str]:
        chooser = PreviewChooser(per_category=5)
        for i in order:
            chooser.offer(JudgedRow(f"s{i}", "c", "train", nothing, nothing, 0, 0, verdict, ()))
        return [row.sample_id for row in chooser.chosen()]

    forward = chosen(range(100))
    assert len(forward) == 5
    assert forward == chosen(reversed(range(100)))
    assert forward != ["s0", "s1", "s2", "s3", "s4"]


def test_file_with_tools_is_checked_to_the_text_with_a_checkpoint(
    tmp_path: Path, checkpoint: Path, verifier: Verifier
) -> None:
    encode = lambda text: verifier.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    head = encode("<|im_user|>user<|im_middle|>convert<|im_end|><|im_assistant|>assistant<|im_middle|><think>")
    rows = [
        {"prompt_ids": head, "output_ids": encode(call(arguments)), "finish_reason": "stop", "tools": json.loads(TOOLS)}
        for arguments in ('{"value": 3}', "{}")
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = judge_file(path, "demo", tokenizer=checkpoint)
    assert (first.flags, first.unchecked, first.tool_calls) == ((), ("count_mismatch",), 1)
    assert second.flags == ("tool_arguments_schema",)
