"""Our loss mask beside speculators' own boundary function."""

import pytest
from hypothesis import given

from aerie.boundary import response_mask

from .families import family
from .test_properties import BY_LETTERS, shape

pytestmark = pytest.mark.slow  # importing speculators takes ten seconds and more


@pytest.fixture(scope="module")
def build_boundary_sample() -> object:
    from speculators.cli.regenerate_responses import build_boundary_sample

    return build_boundary_sample


@pytest.mark.parametrize("name", BY_LETTERS)
def test_mask_of_well_formed_rows_is_that_of_speculators(name: str, build_boundary_sample) -> None:  # type: ignore[no-untyped-def]
    s = shape(name)
    f = s.family

    @given(s.responses())
    def check(letters: str) -> None:
        output = s.ids_of(letters)
        input_ids, loss_mask = build_boundary_sample(f.prompt, output)
        assert input_ids == [*f.prompt, *output]
        assert loss_mask == response_mask(len(f.prompt), len(output), f.judge(output).end).tolist()

    check()


def test_mask_stops_at_the_end_token_where_speculators_trains_what_follows(build_boundary_sample) -> None:  # type: ignore[no-untyped-def]
    # Such a row is quarantined here; the difference is why the two are only compared on plain rows.
    f = family("kimi_k25")
    output = [301, f.close, 302, f.end, 303]
    _, theirs = build_boundary_sample(f.prompt, output)
    verdict = f.judge(output)
    ours = response_mask(len(f.prompt), len(output), verdict.end).tolist()
    assert verdict.reasons == ("tokens_after_end",)
    assert (sum(theirs), sum(ours)) == (5, 4)
