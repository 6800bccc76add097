"""From the form of the second DAG to a request: which drafter is meant, and what is refused."""

import pytest

from aerie.artefacts.manifest import write_manifest
from aerie.drafter_benchmarks import benchmark_request, parse_parameters
from aerie.errors import BadInput
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import PublishSettings, load_settings

DRAFTER = "main-abcdef012345"
EVENTS = [
    {"drafter_id": "old-1", "edition": "old", "finished_at": "2026-12-01T10:00:00+00:00"},
    {"drafter_id": DRAFTER, "edition": "main", "finished_at": "2026-12-01T12:00:00+00:00"},
]


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The request that a form makes, in a data root with one exported drafter."""
    monkeypatch.setenv("AERIE_HOME", str(tmp_path))
    folder = tmp_path / "data" / "editions" / "main"
    (folder / "drafter").mkdir(parents=True)
    write_manifest(
        folder / "export.manifest.json", stage="export", edition="main", dataset=None,
        fingerprint="abcdef0123456789", inputs=[], outputs=[], counts={},
    )  # fmt: skip
    demo = load_settings(PROJECT_ROOT / "demo" / "config.yaml")
    settings = demo.model_copy(update={"publish": PublishSettings(folder=tmp_path / "published")})
    uri = (folder / "drafter").as_uri()
    rows = [{"drafter_id": name, "edition": "main", "uri": uri} for name in (DRAFTER, "main-000000000000")]

    def make(*events, **params):
        parameters = parse_parameters({"datasets": ["B1_glaive"], **params}).with_published(events)
        return benchmark_request(settings, parameters, rows, run_id="run 1")

    make.folder = folder
    make.root = tmp_path
    return make


def test_a_drafter_is_found_by_its_id_its_folder_and_its_uri(asked):
    folder = asked.folder / "drafter"
    target = asked(drafter=DRAFTER).target
    assert (target.drafter, target.drafter_id) == (folder.resolve(), DRAFTER)
    for named in (str(folder), folder.as_uri()):
        assert asked(drafter=named).target.drafter == folder.resolve()


def test_the_published_copy_is_taken_where_there_is_one_and_is_known_by_its_folder(asked):
    published = asked.root / "published" / DRAFTER
    published.mkdir(parents=True)
    assert asked(drafter=DRAFTER).target.drafter == published.resolve()
    assert asked(drafter=str(published)).target.drafter_id == DRAFTER


def test_a_drafter_whose_folder_holds_another_one_by_now_is_refused(asked):
    with pytest.raises(BadInput, match=f"{DRAFTER} was exported in its place"):
        asked(drafter="main-000000000000")


def test_an_unknown_drafter_is_told_of_those_that_there_are(asked):
    with pytest.raises(BadInput, match=f"not in the registry; it has {DRAFTER}"):
        asked(drafter="main-ffffffffffff")


def test_the_newest_published_drafter_starts_with_its_own_edition_unless_another_is_named(asked):
    request = asked(*EVENTS, edition="other")
    assert (request.target.drafter_id, request.edition) == (DRAFTER, "main")
    assert asked(*EVENTS, server_url="http://10.0.0.5:8000").target.drafter is None
    with pytest.raises(BadInput, match="expected either a drafter or the URL"):
        asked()


@pytest.mark.parametrize("outside", ["/etc", "../../etc", "file:///etc/passwd"])
def test_nothing_outside_the_folders_of_data_is_read(asked, outside):
    with pytest.raises(BadInput, match="expected an absolute path below"):
        asked(drafter=outside)
    with pytest.raises(BadInput, match="expected an absolute path below"):
        asked(drafter=DRAFTER, prompts_file=outside)


def test_a_link_out_of_the_data_root_is_followed_before_it_is_judged(asked):
    (asked.folder / "elsewhere").symlink_to("/etc")
    with pytest.raises(BadInput, match="expected an absolute path below"):
        asked(drafter=str(asked.folder / "elsewhere"))


def test_what_the_form_gives_is_measured_and_the_rest_is_the_configurations(asked):
    request = asked(drafter=DRAFTER, concurrency=[1, 16], num_steps=5, num_draft_tokens=6)
    assert request.target.concurrency == (1, 16)
    benchmark = request.settings.benchmark
    assert (benchmark.num_steps, benchmark.num_draft_tokens, benchmark.eagle_topk) == (5, 6, 1)
    assert asked(drafter=DRAFTER).target.concurrency == (8,)
    assert request.selected == ("B1_glaive",)


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"server_url": "http://10.0.0.5:8000", "num_steps": 3}, "num_steps with server_url: a server that runs"),
        ({"server_url": "http://10.0.0.5:8000", "drafter": DRAFTER}, "expected either a drafter or the URL"),
        ({"drafter": DRAFTER, "verifier_url": "http://10.0.0.5:8000"}, "verifier_url is for a server of someone"),
        ({"server_url": "10.0.0.5:8000"}, "server_url: .*expected"),
        ({"drafter": DRAFTER, "edition": "../x"}, "edition"),
        ({"drafter": DRAFTER, "concurrency": [0]}, "concurrency"),
        ({"drafter": DRAFTER, "num_steps": 5}, "a chain .* of 5 steps has 6"),
        ({"drafter": DRAFTER, "datasets": ["Z9_none"]}, "Z9_none"),
    ],
)  # fmt: skip
def test_a_form_that_makes_no_benchmark_is_refused_by_name(asked, params, why):
    with pytest.raises(BadInput, match=why):
        asked(**params)
