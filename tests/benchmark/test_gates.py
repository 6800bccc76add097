"""Gates, and the checklist of usual causes behind one that failed."""

from dataclasses import replace

import pytest

from aerie.benchmark.advice import FOR_CAUSES, FOR_GATES
from aerie.benchmark.boundaries import Boundaries, Closing
from aerie.benchmark.checklist import Circumstances, evaluate
from aerie.benchmark.estimate import Estimate
from aerie.benchmark.gates import judge_gates, require_gates
from aerie.benchmark.losslessness import judge
from aerie.benchmark.measures import Divergence
from aerie.benchmark.production import Production, drafter_in_production
from aerie.benchmark.recommendation import Tried, recommend
from aerie.errors import Failed
from aerie.settings.pipeline import DraftSettings

ALIKE = Boundaries("</think>", Closing(500, 0.97, 60.0), Closing(64, 1.0, 55.0))
HEALTHY = Circumstances(
    captured_layers=[2, 4, 5],
    exported_layer_ids=[1, 3, 4],
    served_layer_ids=[1, 3, 4],
    parity={"rows": 4, "maximum_relative": 0.0017, "tolerance": 0.005},
    last_slot={"tokens": 1674, "agreement": 0.97, "after_norm": 0.0, "problem": None},
    rows={"rows": 511, "broken": {}, "first": None, "problem": None},
    coverage=0.991,
    minimum_coverage=0.98,
    algorithm="EAGLE3",
    window=None,
    boundaries=ALIKE,
    estimate=Estimate((0.7, 0.7, 0.7), 1.0),
    served=2.5,
    first_loss=4.0,
    last_loss=1.0,
)
STRIPPED = replace(ALIKE, data=Closing(500, 0.0, 0.0))


def verdicts(**changed):
    return {cause.cause: cause.verdict for cause in evaluate(replace(HEALTHY, **changed))}


def test_nothing_is_suspect_of_a_healthy_run():
    assert set(verdicts().values()) == {"ok"}


@pytest.mark.parametrize(
    ("changed", "cause", "verdict"),
    [
        ({"served_layer_ids": [2, 4, 5]}, "layer ids", "suspect"),  # not what the export wrote
        ({"served_layer_ids": [0, 3, 4], "exported_layer_ids": [0, 3, 4]}, "layer ids", "suspect"),
        ({"parity": {"rows": 4, "maximum_relative": 0.4, "tolerance": 0.005}}, "layer ids", "suspect"),
        ({"parity": None}, "layer ids", "not known"),
        ({"parity": None}, "norm position", "ok"),  # the verifier's head reads the states
        ({"parity": None, "last_slot": None}, "norm position", "not known"),
        ({"last_slot": {"problem": "these are another model's states"}}, "norm position", "suspect"),
        ({"rows": {"problem": "of 511 rows, some break: no_close 511"}}, "boundary broken in the data", "suspect"),
        ({"parity": {"rows": 4, "maximum_relative": 0.4, "tolerance": 0.005}}, "norm position", "suspect"),
        ({"coverage": 0.4}, "vocabulary mapping", "suspect"),
        ({"algorithm": "EAGLE"}, "algorithm name", "suspect"),
        ({"boundaries": STRIPPED}, "boundary broken in the data", "suspect"),
        (
            {"boundaries": replace(ALIKE, data=Closing(500, 1.0, 2.0))},
            "boundary broken in the data",
            "suspect",
        ),
        ({"served": 1.31}, "boundary broken in the data", "suspect"),  # validation said 2.55
        ({"boundaries": None, "estimate": None, "rows": None}, "boundary broken in the data", "not known"),
        ({"window": 2048}, "sliding window", "suspect"),
        ({"last_loss": 3.9}, "too little training", "suspect"),
    ],
)
def test_each_usual_cause_is_judged_by_what_the_run_knows(changed, cause, verdict):
    assert verdicts(**changed)[cause] == verdict


def gates(length=2.5, *, production=None, share=1.0, partings=()):
    lossless = judge(list(partings), compared=8, exact=True, between_batch_sizes=None)
    return judge_gates(
        length, minimum=2.0, production=production or Production("none"), minimum_share=share, lossless=lossless
    )


def failed(found):
    return [gate.gate for gate in found if gate.verdict == "failed"]


def test_a_drafter_that_passes_every_gate_is_not_failed():
    require_gates(gates(), evaluate(HEALTHY))


@pytest.mark.parametrize("length", [1.0, 1.01])
def test_an_acceptance_length_of_one_is_wired_wrongly_whatever_the_threshold(length):
    assert "accepts at all" in failed(gates(length))


def test_a_failed_gate_names_the_suspects_first_with_their_evidence():
    with pytest.raises(Failed, match=r"1\.310 is below benchmark\.minimum_acceptance_length 2") as failure:
        require_gates(gates(1.31), evaluate(replace(HEALTHY, served=1.31, boundaries=STRIPPED)))
    lines = str(failure.value).splitlines()
    assert lines[2].startswith("- suspect: boundary broken in the data: validation promised 2.53, served 1.31")
    assert "0% of 500 training rows" in lines[2] and "100% of 64 of the verifier's own outputs" in lines[2]
    for said in ("[2, 4, 5]", "[1, 3, 4]", "99.10%", "runs EAGLE3"):
        assert said in str(failure.value)


def test_what_to_do_is_said_of_each_gate_that_failed_and_each_cause_that_is_suspect():
    with pytest.raises(Failed) as failure:
        require_gates(gates(1.31), evaluate(replace(HEALTHY, served=1.31, boundaries=STRIPPED)))
    _, _, advice = str(failure.value).partition("what to do:\n")
    assert advice.splitlines() == [
        f"- threshold: {FOR_GATES['threshold']}",
        f"- boundary broken in the data: {FOR_CAUSES['boundary broken in the data']}",
    ]


def test_no_gate_and_no_cause_is_without_advice():
    assert {gate.gate for gate in gates()} == set(FOR_GATES)
    assert {cause.cause for cause in evaluate(HEALTHY)} == set(FOR_CAUSES)


def test_a_drafter_lower_than_the_one_in_production_fails():
    before = Production("as measured", "main-before", 2.6)
    assert failed(gates(2.5, production=before)) == ["against the drafter in production"]
    assert failed(gates(2.6, production=before)) == []
    assert failed(gates(2.5, production=before, share=0.95)) == []
    assert failed(gates(2.5, production=before, share=0)) == []


@pytest.mark.parametrize("share", [1.0, 0])
def test_a_drafter_in_production_that_cannot_be_measured_fails_the_gate_and_the_way_out_is_named(share):
    found = gates(production=Production("it is no longer at /published/main-before", "main-before"), share=share)
    assert failed(found) == (["against the drafter in production"] if share else [])
    if share:
        with pytest.raises(Failed, match=r"main-before is in production, but .*minimum_share_of_production to 0"):
            require_gates(found, evaluate(HEALTHY))


def test_a_drafter_that_changes_the_output_fails():
    from aerie.benchmark.losslessness import Parting

    changed = [Parting(Divergence("B1", "a", 7, 1, 2), None)]
    assert failed(gates(3.0, partings=changed)) == ["lossless"]


def row(drafter_id, *, uri="file:///no/such/folder", length=2.6, **benchmark):
    known = {
        "verifier": "v", "measured_as": "prompts", "drafter_fingerprint": drafter_id, "acceptance_length": length,
    }  # fmt: skip
    return {"drafter_id": drafter_id, "uri": uri, "benchmark": {**known, **benchmark}}


@pytest.mark.parametrize(
    ("rows", "drafter_id", "length"),
    [
        ([], None, None),
        ([row("new"), row("old", length=2.2)], "new", 2.6),
        ([row("new", verifier="another"), row("old", length=2.2)], "old", 2.2),
        ([row("mine"), row("old", length=2.2)], None, None),  # measured again, it is not compared with itself
        ([{"drafter_id": "new", "uri": "file:///new", "benchmark": {}}], None, None),
        ([row("new", measured_as="other prompts")], "new", None),  # its folder is gone
    ],
)
def test_in_production_is_what_was_published_last_for_this_verifier(tmp_path, rows, drafter_id, length):
    found = drafter_in_production(
        rows, verifier="v", drafter_fingerprint="mine", measured_as="prompts", published=tmp_path
    )
    assert (found.drafter_id, found.acceptance_length, found.folder) == (drafter_id, length, None)


def test_a_drafter_in_production_whose_figure_is_of_other_prompts_is_measured_again(tmp_path):
    there, here = tmp_path / "there" / "new", tmp_path / "here" / "new"

    def found():
        return drafter_in_production(
            [row("new", uri=there.as_uri(), measured_as="other prompts")],
            verifier="v", drafter_fingerprint="mine", measured_as="prompts", published=here.parent,
        )  # fmt: skip

    assert (found().drafter_id, found().folder) == ("new", None)
    assert str(there) in found().said and str(here) in found().said
    here.mkdir(parents=True)
    assert (found().drafter_id, found().acceptance_length, found().folder) == ("new", None, here)
    there.mkdir(parents=True)
    assert found().folder == there, "where it was published to, and not where this configuration publishes"


def tried(steps, speed, length, *, different=0):
    return Tried(DraftSettings(num_steps=steps, num_draft_tokens=steps + 1), speed, length, different)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ([tried(3, 100, 2.5), tried(5, 120, 2.4)], 5),
        ([tried(3, 119.5, 2.5), tried(5, 120, 2.4)], 3),  # as fast, and more is accepted
        ([tried(3, 120, 2.5), tried(5, 120, 2.5)], 3),  # as good, with fewer draft tokens
        ([tried(3, 100, 2.5), tried(5, 120, 2.4, different=1)], 3),
    ],
)
def test_the_fastest_draft_setting_is_recommended_and_among_equals_the_one_that_accepts_most(settings, steps):
    assert recommend(settings).setting.num_steps == steps


def test_no_setting_that_changes_the_output_is_recommended():
    assert recommend([tried(3, 100, 2.5, different=1)]) is None
