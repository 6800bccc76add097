"""A drafter's history, from manifests alone."""

from datetime import UTC, datetime, timedelta

import pytest

from aerie.artefacts.manifest import Manifest
from aerie.errors import BadInput
from aerie.lineage import trace_drafter

START = datetime(2026, 1, 2, tzinfo=UTC)


def manifest(stage, minute, *, reads=(), writes=(), dataset=None, fingerprint="f"):
    def uri(name):
        return f"file:///data/{name}"

    return Manifest(
        schema=1, stage=stage, edition="main", dataset=dataset, fingerprint=f"{fingerprint}-{stage}", counts={},
        inputs=[{"uri": uri(name), "sha256": sha256} for name, sha256 in reads],
        outputs=[{"uri": uri(name), "sha256": sha256, "bytes": 1} for name, sha256 in writes],
        finished_at=START + timedelta(minutes=minute),
    )  # fmt: skip


def history():
    return [
        manifest("prepare", 0, reads=[("source.jsonl", "s")], writes=[("prompts", "p")], dataset="B1"),
        manifest("generate", 1, reads=[("prompts", "p")], writes=[("responses", "r")], dataset="B1"),
        manifest("validate", 2, reads=[("responses", "r"), ("asked", "x")], writes=[("samples", "v")], dataset="B1"),
        manifest("merge", 3, reads=[("samples", "v")], writes=[("corpus", "c")]),
        manifest("train", 4, reads=[("corpus", "c")], writes=[("checkpoint", "t")]),
        manifest("export", 5, reads=[("checkpoint", "t")], writes=[("drafter", "d")]),
        manifest("benchmark", 6, reads=[("drafter", "d")]),
    ]


def proofs(lineage):
    return {(node.manifest.stage, link.name): link.proof for node in lineage.nodes for link in node.links}


def test_a_history_goes_from_the_drafter_to_the_sources_and_every_link_is_proven():
    lineage = trace_drafter(history(), drafter_fingerprint="f-export")
    stages = [node.manifest.stage for node in lineage.nodes]
    assert stages == ["export", "train", "merge", "validate", "generate", "prepare"]
    assert proofs(lineage) == {
        ("export", "checkpoint"): "proven", ("train", "corpus"): "proven", ("merge", "samples"): "proven",
        ("validate", "responses"): "proven", ("validate", "asked"): "unknown", ("generate", "prompts"): "proven",
        ("prepare", "source.jsonl"): "source",
    }  # fmt: skip
    assert lineage.broken == () and lineage.datasets == ("B1",)


def test_a_file_that_was_made_anew_in_between_breaks_the_link_and_says_what_it_is_now():
    changed = [one for one in history() if one.stage != "validate"]
    changed.append(manifest("validate", 9, reads=[("responses", "r")], writes=[("samples", "new")], dataset="B1"))
    ((node, link),) = trace_drafter(changed, drafter_fingerprint="f").broken
    assert (node.manifest.stage, link.sha256, link.written_sha256) == ("merge", "v", "new")


def test_a_file_made_anew_with_its_old_version_still_known_is_proven_by_that():
    later = manifest("validate", 9, reads=[("responses", "r")], writes=[("samples", "new")], dataset="B1")
    lineage = trace_drafter([*history(), later], drafter_fingerprint="f")
    assert lineage.broken == ()
    (validated,) = lineage.of_stage("validate", dataset="B1")
    assert validated.manifest.finished_at == START + timedelta(minutes=2)


def test_a_drafter_whose_export_is_not_known_has_no_history():
    with pytest.raises(BadInput, match="no manifest of stage export has the fingerprint zzz"):
        trace_drafter(history(), drafter_fingerprint="zzz")
