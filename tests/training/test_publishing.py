"""What stands where a drafter was published: both layouts or neither, told by its record and its card."""

import pytest

from aerie.artefacts.drafter_record import read_record
from aerie.artefacts.manifest import describe_output, write_manifest
from aerie.errors import Failed
from aerie.training import publishing
from aerie.training.checkpoints import CHECKPOINT_FILES
from aerie.training.publishing import publish
from tests.drafters import COUNTS, MEASURED

EXPORT = "e" * 64


@pytest.fixture
def exported(edition):
    """Exports the edition's drafter in some layouts, as far as publishing looks, and passes its benchmark."""

    def export(*layouts):
        folders = {"sglang": edition.files.drafter, "vllm": edition.files.vllm_drafter}
        written = []
        for layout in layouts:
            folders[layout].mkdir(parents=True)
            for name in CHECKPOINT_FILES:
                (folders[layout] / name).write_text(f"{name} for {layout}")
                written.append(folders[layout] / name)
        made = {"datasets": {"B1_glaive": {}}}, {"verifier_fingerprint": "a" * 64, "versions": {"speculators": "0.9.0"}}
        counts = {**COUNTS, "merge": {**COUNTS["merge"], **made[0]}, "train": {**COUNTS["train"], **made[1]}}
        counts |= {"export": {}, "benchmark": {**MEASURED, "drafter_fingerprint": EXPORT}}
        for stage, counted in counts.items():
            write_manifest(
                edition.files.manifest(stage), stage=stage, edition="main", dataset=None, inputs=[], counts=counted,
                fingerprint=EXPORT if stage == "export" else stage,
                outputs=[describe_output(path) for path in written] if stage == "export" else [],
            )  # fmt: skip
        return edition

    return export


def published_in(edition):
    folder = edition.root / "published" / f"main-{EXPORT[:12]}"
    return folder, {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_drafter_is_published_for_both_servers_and_record_and_card_name_both(exported):
    edition = exported("sglang", "vllm")
    manifest = publish(edition.request(), edition.events).manifest
    folder, files = published_in(edition)
    assert files == {
        "config.json", "model.safetensors", "vllm/config.json", "vllm/model.safetensors", "aerie.json", "README.md",
    }  # fmt: skip
    assert {one.uri for one in manifest.outputs} == {(folder / name).as_uri() for name in files}
    assert (folder / "model.safetensors").read_text() == "model.safetensors for sglang"
    assert (folder / "vllm" / "model.safetensors").read_text() == "model.safetensors for vllm"
    assert read_record(folder).layouts == {"sglang": ".", "vllm": "vllm"}
    card = (folder / "README.md").read_text()
    assert "--speculative-draft-model-path THIS_FOLDER " in card
    assert (
        """vllm serve VERIFIER --speculative-config '{"method": "eagle3", "model": "THIS_FOLDER/vllm", """
        """"num_speculative_tokens": 3}'"""
    ) in card
    # Where it was exported, the other layout is a folder beside.
    assert read_record(edition.files.drafter).layouts == {"sglang": ".", "vllm": "../drafter_vllm"}
    assert publish(edition.request(), edition.events).reused


def test_a_drafter_that_vllm_cannot_serve_is_published_for_sglang_and_promises_no_more(exported):
    edition = exported("sglang")
    publish(edition.request(), edition.events)
    folder, files = published_in(edition)
    assert files == {"config.json", "model.safetensors", "aerie.json", "README.md"}
    assert read_record(folder).layouts == {"sglang": "."}
    assert "vllm" not in (folder / "README.md").read_text()


def test_a_publishing_that_ends_between_the_layouts_leaves_what_was_there(exported, monkeypatch):
    edition = exported("sglang", "vllm")
    copy = publishing.shutil.copyfile

    def fail_at_vllm(source, target):
        if "drafter_vllm" in str(source):
            raise OSError(28, "No space left on device")
        copy(source, target)

    monkeypatch.setattr(publishing.shutil, "copyfile", fail_at_vllm)
    with pytest.raises(OSError, match="No space left"):
        publish(edition.request(), edition.events)
    assert list((edition.root / "published").iterdir()) == []
    assert not edition.files.manifest("publish").exists()


def test_a_layout_that_changed_after_its_export_is_not_published(exported):
    edition = exported("sglang", "vllm")
    (edition.files.vllm_drafter / "config.json").write_text("changed")
    with pytest.raises(Failed, match="changed after they were exported"):
        publish(edition.request(), edition.events)
