"""What the pages of data sets, samples and drafters show: an edition whose samples were judged and trained on."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

SCRIPT = "<script>document.title = 'taken over'</script>"
JUDGED = "second"
DATASET = "B1_glaive"
ODD_ID = 'shard 1/100% of "it" & more.<b>über</b>'
ODD_EDITION, ODD_DATASET = "of before. 100%", "B9.über & co"
HERE = f"/editions/{JUDGED}/datasets/{DATASET}"
ODD = f"/editions/{quote(ODD_EDITION, safe='')}/datasets/{quote(ODD_DATASET, safe='')}"
DRAFTER = f"{JUDGED}-f0f0f0f0f0f0"
REJECTED = f"{JUDGED}-0badc0ffee12"
UNMEASURED = f"{JUDGED}-{'long-' * 9}0123456789ab"
LOOPING, KEPT, UNDECODED, FAILED = "glaive-013", "glaive-000", "glaive-001", "glaive-117"
REASONING = {ODD_ID: 4, KEPT: 80, LOOPING: 2_711}
REPORT = f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Corpus of {JUDGED}</title>
<style>body {{ background: rgb(1, 2, 3) }}</style>{SCRIPT}</head>
<body><p style="color: rgb(4, 5, 6)">94 rows</p></body></html>
"""
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


def fill_samples(connection: Any, home: Path) -> None:
    """Samples with previews, odd names, a response log, a corpus' report, three drafters and where one comes from."""
    from aerie.artefacts.layout import EditionFiles
    from aerie.artefacts.response_log import Response, encode
    from aerie.store.queries import ledger, previews, runs

    ledger.write_rows(connection, edition=JUDGED, dataset=DATASET, rows=map(_row, range(120)))
    odd = ledger.LedgerRow(ODD_ID, "kept", 1, flags=(SCRIPT,), prompt_tokens=5, completion_tokens=9, reasoning_tokens=4)
    for edition, dataset in ((JUDGED, DATASET), (ODD_EDITION, ODD_DATASET)):
        ledger.write_rows(connection, edition=edition, dataset=dataset, rows=[odd])
        texts = [_preview(ODD_ID, "kept", flags=(SCRIPT,))]
        if dataset == DATASET:
            texts += [_preview(KEPT, "kept"), _preview(LOOPING, "quarantined", reasons=("loop",))]
        previews.load_previews(connection, edition=edition, dataset=dataset, source="validate", previews=texts)
        runs.record_edition(
            connection, edition=edition, dataset=dataset, generation_fingerprint="0a1b2c3d4e5f", rules_fingerprint="r1",
            generation_settings={"model": "kimi", "note": SCRIPT, "context_length": 32768, "sampling": {"top_p": 0.95}},
            rules_settings={"drop_flags": ["repeated"], "strict": True},
        )  # fmt: skip
    log = EditionFiles(home / "data", JUDGED).dataset(DATASET).responses
    log.parent.mkdir(parents=True)
    response = Response(
        sample_id=KEPT, attempt=1, prompt_sha256="a" * 64, prompt_tokens=90, completion_tokens=3,
        max_new_tokens=100, finish_reason={"type": "stop"}, launch_token="launch-0", meta_info={},
        output_ids=(11, 12, 13),
    )  # fmt: skip
    log.write_bytes(encode(response))
    report = EditionFiles(home / "data", JUDGED).corpus_report
    report.parent.mkdir()
    report.write_text(REPORT)
    _fill_history(connection)


def _row(number: int) -> Any:
    from aerie.store.queries.ledger import LedgerRow

    name = f"glaive-{number:03}"
    if number >= 117:
        return LedgerRow(name, "failed", 4, ("http_500",), detail=f"the server said {SCRIPT}", prompt_tokens=90)
    if number >= 110:
        return LedgerRow(name, "skipped", reasons=("held_out",), prompt_tokens=90, split="heldout")
    if number >= 105:
        return LedgerRow(name, "pending", prompt_tokens=90)
    quarantined = number % 10 == 3
    tokens = 120 + number * 7919 % 9000
    return LedgerRow(
        name, "quarantined" if quarantined else "kept", 1 + number % 2,
        reasons=(("loop",) if number % 20 == 13 else ("no_close", "empty_answer")) if quarantined else (),
        flags=("truncated_in_answer",) if number % 10 == 5 else (), prompt_tokens=90 + number,
        completion_tokens=tokens, reasoning_tokens=tokens * 2 // 3, tool_calls=number % 3, generated_tokens=tokens + 30,
        finish_reason="stop", judged_by="validate", admission_rank=number, split="train",
    )  # fmt: skip


def _preview(sample_id: str, verdict: str, **found: tuple[str, ...]) -> dict[str, Any]:
    spans = [
        ("prompt", "<|im_start|>user\nHow far is the Moon?<|im_end|>\n<|im_start|>assistant\n"),
        ("boundary", "<think>"), ("reasoning", f"The user asks for a distance. {SCRIPT}\nIt varies. \u202e\u200b"),
        ("reasoning", "So I say the mean. " * (400 if verdict == "quarantined" else 3)), ("boundary", "</think>"),
        ("answer", "About 384,400 km.\n\n"), ("tool_section", "<|tool_calls_section_begin|>"),
        ("tool_id", "convert:0"), ("tool_arguments", '{"value": 384400}'),
        ("tool_section", "<|tool_calls_section_end|>"), ("end", "<|im_end|>"),
    ]  # fmt: skip
    reasons, flags = found.get("reasons", ()), found.get("flags", ())
    return {
        "sample_id": sample_id, "conversation_id": "c-1", "split": "train", "verdict": verdict, "reasons": reasons,
        "flags": flags, "positions": dict.fromkeys(reasons, (1_234, 5_678)), "prompt_tokens": 90,
        "response_tokens": 120, "reasoning_tokens": REASONING[sample_id], "spans": spans,
    }  # fmt: skip


def _fill_history(connection: Any) -> None:
    from aerie.artefacts.manifest import Manifest
    from aerie.store.queries.benchmarks import record_benchmark
    from aerie.store.queries.drafters import record_drafter
    from aerie.store.queries.manifests import record_manifest
    from aerie.store.queries.metrics import MetricRow, record_metrics

    def uri(name: str) -> str:
        return f"file:///data/editions/{JUDGED}/{name}"

    def manifest(minute: int, stage: str, reads: str, writes: str, dataset: str | None = None, **counts: Any) -> None:
        document = Manifest(
            stage=stage, edition=JUDGED, dataset=dataset, fingerprint=("f0" if stage == "export" else "a1") * 32,
            inputs=[{"uri": uri(name), "sha256": name[0] * 64} for name in reads.split()],
            outputs=[{"uri": uri(name), "sha256": name[0] * 64, "bytes": 4_096} for name in writes.split()],
            counts=counts, finished_at=NOW + timedelta(minutes=minute),
        )  # fmt: skip
        record_manifest(connection, document, "manual__second")

    source = {
        "rows": 1_500, "prompts": 1_380, "skipped": {"no_user_turn": 117, "too_long": 3}, "set_aside": {"duplicate": 0},
        "skipped_examples": {"no_user_turn": [f"row 7: {SCRIPT}"], "too_long": []},
    }  # fmt: skip
    validated = {"reasoning_share": 0.985, "reasoning_rows": 93, "tool_call_rows": 62, "kept": 94, "quarantined": 11}
    manifest(0, "prepare", "source.jsonl", "prompts.parquet", DATASET, **source)
    manifest(1, "generate", "prompts.parquet", "responses.jsonl", DATASET, budget=1_000_000, seconds=5_400.0)
    manifest(2, "validate", "responses.jsonl", "validated.parquet", DATASET, response_tokens=438_211, **validated)
    manifest(3, "merge", "validated.parquet", "merged.parquet", rows=94, tokens=512_000, response_tokens=438_211)
    manifest(4, "vocabulary", "merged.parquet", "vocabulary.json", size=32_000, coverage=0.9934)
    manifest(5, "capture", "merged.parquet", "hidden.safetensors", files=12, tokens=512_000, bytes=64_897_904_123)
    manifest(6, "train", "hidden.safetensors vocabulary.json", "checkpoint", steps=80, epochs=2)
    manifest(7, "export", "checkpoint", "drafter.safetensors", dtype="bfloat16", drafter_parameters=1_250_000_000)
    of_dataset = {
        "prompts": 48, "lossless": True, "acceptance_length": 2.687, "acceptance_length_untrained": 1.02,
        "acceptance_rate": 0.562, "acceptance_by_position": [0.81, 0.52, 0.31], "tokens_per_second": 1_842.4,
        "tokens_per_second_without": 921.2, "speed_up": 2.0,
    }  # fmt: skip
    training = {
        "steps": 80, "epochs": 2, "seconds": 3_725.0, "first_loss": 9.81, "last_loss": 2.113, "layers": [1, 30, 58],
        "drafter_parameters": 1_250_000_000, "draft_vocabulary_size": 32_000, "dtype": "bfloat16",
        "resumed_from_step": 0,
    }  # fmt: skip
    slower = {**of_dataset, "acceptance_length": 1.934, "lossless": False}
    chain, tree = ((3, 1, 4), (3, 4, 16))
    names = ("num_steps", "eagle_topk", "num_draft_tokens")
    figures = {"acceptance_length": 2.687, "tokens_per_second": 1_842.4, "different_outputs": 0}
    tried = [{**dict(zip(names, setting, strict=True)), **figures} for setting in (chain, tree)]
    benchmark = {
        **of_dataset, "definition": "tokens a verify step, the verifier's own included",
        "per_dataset": {DATASET: of_dataset, "B3_magicoder": slower},
        "recommended": dict(zip(names, tree, strict=True)),
        "recommendation": {"rule": "the highest tokens/s", "concurrency": 8, "tried": tried},
        "estimate": {"acceptance_length": 2.82, "relative_distance": -0.047, "coverage": 0.9934},
        "losslessness": {"verdict": "ties", "said": "3 of 96 outputs part, each at a tie"}, "lossless": False,
        "sampled": {"sampling": {"temperature": 0.6}, "acceptance_length": 2.31, "tokens_per_second": 1_590.2},
        "not_measured": {},
        "gates": [
            {"gate": "threshold", "verdict": "passed", "said": "acceptance length 2.687 is at least 2"},
            {"gate": "against production", "verdict": "not judged", "said": "no drafter was published"},
        ],
        "checklist": [
            {"cause": "layer ids", "verdict": "ok", "evidence": "captured [1, 30, 58], served [0, 29, 57]"},
            {"cause": "vocabulary mapping", "verdict": "suspect", "evidence": f"holds 91 % of the tokens {SCRIPT}"},
        ],
    }  # fmt: skip
    place = "file:///published/" + "drafters/" * 6
    common = {"edition": JUDGED, "uri": place}
    record_drafter(connection, drafter_id=DRAFTER, state="published", training=training, benchmark=benchmark, **common)
    record_drafter(connection, drafter_id=UNMEASURED, state="exported", **common)
    for concurrency in (1, 8, 32):
        measured = {
            **benchmark,
            "tokens_per_second": 600.0 * concurrency**0.5,
            "settings": {"concurrency": concurrency},
        }
        record_benchmark(
            connection, measured_at=NOW + timedelta(hours=concurrency), run_id="manual__second", edition=JUDGED,
            drafter_id=DRAFTER, fingerprint=f"b{concurrency}", concurrency=concurrency, document=measured,
        )  # fmt: skip
    _fill_rejected(connection, of_dataset, training, benchmark)
    steps = [
        MetricRow(
            NOW + timedelta(seconds=30 * step - 2_000), "manual__second", JUDGED, None, "train",
            {"step": step, "loss": 9.8 / (1 + step / 12), "accuracy_0": step / 100, "learning_rate": 3e-5},
        )
        for step in range(80)
    ]  # fmt: skip
    record_metrics(connection, steps)


def _fill_rejected(
    connection: Any, of_dataset: dict[str, Any], training: dict[str, Any], benchmark: dict[str, Any]
) -> None:
    """A drafter of stripped reasoning, as its benchmark's failure was told to the store."""
    from aerie.recording import record_event
    from aerie.settings.machine import PROJECT_ROOT
    from aerie.settings.pipeline import load_settings
    from aerie.stages import StageRequest
    from aerie.store.queries.drafters import record_drafter

    place = Path("/data")
    request = StageRequest(
        settings=load_settings(PROJECT_ROOT / "demo" / "config.yaml"), data_root=place, server_folder=place,
        edition=JUDGED, selected=(DATASET,), phase="benchmark", run_id="manual__rejected",
    )  # fmt: skip
    poor = {**of_dataset, "acceptance_length": 1.31, "speed_up": 0.88, "tokens_per_second": 810.7}
    counts = {
        **benchmark, **poor, "drafter_fingerprint": "0badc0ffee12" + "0" * 52, "per_dataset": {DATASET: poor},
        "settings": {"concurrency": 8}, "by_concurrency": [{**poor, "concurrency": 8}],
        "estimate": {"acceptance_length": 2.55, "relative_distance": -0.486, "coverage": 0.9934},
        "losslessness": {"verdict": "identical", "said": "identical for 96 of 96 outputs"},
        "sampled": None, "not_measured": {"sampled": "on a CPU SGLang verifies greedily whatever the temperature"},
        "gates": [
            {"gate": "accepts at all", "verdict": "passed", "said": "acceptance length 1.310"},
            {
                "gate": "threshold", "verdict": "failed",
                "said": "acceptance length 1.310 is below benchmark.minimum_acceptance_length 1.6",
            },
            {
                "gate": "against the drafter in production", "verdict": "failed",
                "said": f"acceptance length 1.310 is 48.8% of the 2.687 of {DRAFTER} on the same prompts (as measured "
                "before it was published); at least 100% was asked for (benchmark.minimum_share_of_production)",
            },
            {
                "gate": "lossless", "verdict": "passed",
                "said": "greedy output with the drafter: identical for 96 of 96 outputs",
            },
        ],
        "checklist": [
            *benchmark["checklist"],
            {
                "cause": "boundary broken in the data", "verdict": "suspect",
                "evidence": "validation promised 2.55, served 1.31: rows broken alike in training and validation show "
                "only here; </think> closes the reasoning in 0% of 500 training rows, after a median of 0 tokens; in "
                "100% of 64 of the verifier's own outputs here, after 55",
            },
            {"cause": "sliding window", "verdict": "ok", "evidence": "none: the server has no draft window"},
            {"cause": "norm position", "verdict": "not known", "evidence": "hidden_states.parity_rows is 0"},
        ],
    }  # fmt: skip
    record_drafter(
        connection, drafter_id=REJECTED, edition=JUDGED, uri=request.files.drafter.as_uri(), state="exported",
        training=training,
    )  # fmt: skip
    event = {"type": "rejected", "time": NOW.timestamp(), "fingerprint": "b0", "counts": counts}
    record_event(connection, "benchmark", request, event)
