"""The pages of data sets, samples and drafters: filters, pages, odd names, and text that stays text."""

import json
import re
from contextlib import contextmanager
from html import unescape
from urllib.parse import quote

import pytest

from aerie.artefacts.layout import EditionFiles
from aerie.benchmark.advice import FOR_CAUSES, FOR_GATES
from aerie.store.connection import connected, transaction
from aerie.store.queries.runs import record_run
from aerie_dashboard.pages.dataset import SAMPLES_A_PAGE

from ...dashboard import EDITION, RUN
from ...dashboard_samples import (
    DATASET,
    DRAFTER,
    FAILED,
    HERE,
    JUDGED,
    KEPT,
    LOOPING,
    ODD,
    ODD_DATASET,
    ODD_ID,
    REJECTED,
    REPORT,
    SCRIPT,
    UNDECODED,
    UNMEASURED,
)
from .test_pages import text_of, words_of

ROWS_OF_A_STATE = 50


def sample_path(sample_id, here=HERE):
    return f"{here}/samples/{quote(sample_id, safe='')}"


def ids_of(page):
    return [unescape(found) for found in re.findall(r'<td class="id"><a [^>]*title="([^"]*)"', page)]


def link_of(page, kind):
    """Where a link to another page of the list leads, as a browser reads it; None where there is none."""
    found = re.search(rf'rel="{kind}" href="/aerie([^"]*)"', page)
    return unescape(found[1]) if found else None


@pytest.mark.parametrize(
    "path",
    [
        HERE, f"{HERE}/samples", sample_path(KEPT), sample_path(LOOPING), sample_path(FAILED), sample_path(ODD_ID),
        ODD, f"{ODD}/samples", sample_path(ODD_ID, ODD), f"/drafters/{DRAFTER}", f"{HERE}/responses",
        f"{HERE}/samples?prefix={quote(SCRIPT)}", f"{HERE}/samples?finding={quote(SCRIPT)}",
    ],
)  # fmt: skip
def test_markup_of_a_sample_or_a_name_stays_text(dashboard, path):
    page = text_of(dashboard, path)
    assert "<script>document" not in page and "<b>über" not in page


def test_a_response_with_a_script_is_shown_letter_for_letter(dashboard):
    page = text_of(dashboard, sample_path(KEPT))
    assert SCRIPT in unescape(page) and SCRIPT not in page
    assert '<span class="token" title="special token">&lt;think&gt;</span>' in page
    assert "U+202E" in page and "\u202e" not in page


def test_a_sample_shows_its_verdict_its_lengths_and_where_it_went_wrong(dashboard):
    words = words_of(text_of(dashboard, sample_path(LOOPING)))
    assert "quarantined" in words and "at token 1,234, 5,678" in words and "finish reason stop" in words
    assert "The other 6,1" in words  # characters of a long text are folded, not left out


def test_a_sample_without_text_says_how_to_see_it(dashboard):
    words = unescape(words_of(text_of(dashboard, sample_path(UNDECODED))))
    assert "This sample was not decoded" in words
    assert f"./aerie quarantine show {UNDECODED} --edition {JUDGED}" in words


def test_a_command_with_an_odd_id_is_quoted_for_the_shell(dashboard):
    words = unescape(text_of(dashboard, sample_path(ODD_ID)))
    assert f"regenerate '{ODD_ID}' --edition {JUDGED}" in words


def test_a_failed_sample_says_why(dashboard):
    assert f"the server said {SCRIPT}" in unescape(text_of(dashboard, sample_path(FAILED)))


def test_the_raw_row_is_the_logs_own_and_is_no_page(dashboard):
    with dashboard.client("viewer") as client:
        answer = client.get(f"/aerie{HERE}/responses/{KEPT}")
        missing = client.get(f"/aerie{HERE}/responses/{UNDECODED}")
    assert answer.headers["Content-Type"] == "application/json"
    assert json.loads(answer.text)["output_ids"] == [11, 12, 13]
    assert missing.status_code == 404 and "has no row of sample" in missing.text


def test_pages_of_samples_lead_over_every_sample_once_and_back(dashboard):
    pages, path = [], f"{HERE}/samples"
    while path:
        page = text_of(dashboard, path)
        pages.append((path, ids_of(page)))
        path = link_of(page, "next")
    everything = [name for _, found in pages for name in found]
    assert len(everything) == len(set(everything)) == 121 and everything == sorted(everything)
    assert [len(found) for _, found in pages] == [SAMPLES_A_PAGE, SAMPLES_A_PAGE, 121 - 2 * SAMPLES_A_PAGE]
    assert link_of(text_of(dashboard, pages[0][0]), "prev") is None
    back = link_of(text_of(dashboard, pages[2][0]), "prev")
    assert ids_of(text_of(dashboard, back)) == pages[1][1]
    first = link_of(text_of(dashboard, back), "prev")
    assert ids_of(text_of(dashboard, first)) == pages[0][1]


@pytest.mark.parametrize("end", ["after=zzz", f"before={quote('!')}"])
def test_a_page_beyond_the_ends_is_empty_and_leads_back(dashboard, end):
    page = text_of(dashboard, f"{HERE}/samples?{end}")
    assert "No sample is like this" in page and ids_of(page) == []


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("state=quarantined", 11), ("state=quarantined&finding=loop", 5), ("finding=no_close", 6),
        ("finding=truncated_in_answer", 10), ("state=kept&finding=loop", 0), ("state=skipped", 7),
        ("state=failed&finding=http_500", 3), ("decoded=true", 3), ("decoded=true&state=quarantined", 1),
        ("finding=nothing", 0), (f"prefix={LOOPING}", 1), ("prefix=glaive-01", 10), ("prefix=laive", 0),
        ("prefix=%25", 0), ("prefix=glaive_", 0), (f"prefix={quote('shard 1/100%')}", 1), ("state=in_flight", 0),
    ],
)  # fmt: skip
def test_samples_are_narrowed_by_verdict_reason_text_and_beginning_of_the_id(dashboard, query, count):
    page = text_of(dashboard, f"{HERE}/samples?{query}")
    assert len(ids_of(page)) == count
    assert ("No sample is like this" in page) == (count == 0)


def test_the_next_page_keeps_the_filter(dashboard):
    page = text_of(dashboard, f"{HERE}/samples?state=kept")
    assert len(ids_of(page)) == ROWS_OF_A_STATE
    following = text_of(dashboard, link_of(page, "next"))
    assert set(re.findall(r'class="state state-([a-z-]+)"', following)) == {"kept"}


def test_the_reasons_on_the_page_of_a_data_set_lead_to_their_samples(dashboard):
    page = text_of(dashboard, HERE)
    links = {unescape(link) for link in re.findall(r'href="/aerie([^"]*finding=[^"]*)"', page)}
    counts = {link: len(ids_of(text_of(dashboard, link))) for link in links}
    assert counts[f"{HERE}/samples?state=quarantined&finding=loop"] == 5
    assert counts[f"{HERE}/samples?state=kept&finding=truncated_in_answer"] == 10
    assert all(counts.values())


def test_a_data_set_shows_its_figures_with_separators(dashboard):
    words = words_of(text_of(dashboard, HERE))
    assert "98.5%" in words and "1.00 M" in words and "rows 1,500" in words.replace("Rows of", "rows")
    assert "no user turn" in words and "117" in words and "median" in words


@pytest.mark.parametrize(
    "path",
    [
        f"/editions/{JUDGED}/datasets/B9_none", f"/editions/none/datasets/{DATASET}", "/drafters/none",
        f"/editions/{JUDGED}/datasets/B9_none/samples", f"{HERE}/samples/none", f"{HERE}/responses/none",
        f"{HERE}/samples?state=none", f"/editions/..%2f..%2f/datasets/{DATASET}/responses",
        f"/editions/%2e%2e/datasets/{DATASET}", f"{HERE}/samples/..%2f..%2fetc%2fpasswd", "/servers/none/log",
        f"{ODD}/responses", "/editions/none/corpus/report", "/editions/..%2f..%2fsecond/corpus/report",
        "/editions/%2e%2e/corpus/report", "/static/..%2fsecurity.py", "/nothing",
    ],
)  # fmt: skip
def test_an_unknown_name_is_a_404_that_says_so(dashboard, path):
    page = text_of(dashboard, path, 404)
    assert "404" in page and "Traceback" not in page


def test_a_name_with_a_null_character_is_refused_as_no_name(dashboard):
    for path in (f"{HERE}/samples/a%00b", f"{HERE}/samples?prefix=a%00b", f"{HERE}/samples?finding=%00"):
        with dashboard.client("viewer") as client:
            assert client.get(f"/aerie{path}").status_code in (404, 422)


def test_odd_names_lead_from_page_to_page(dashboard):
    page = text_of(dashboard, "/")
    assert f'href="/aerie{ODD}"' in page
    page = text_of(dashboard, ODD)
    assert ODD_DATASET in unescape(page) and f'href="/aerie{ODD}/samples"' in page
    page = text_of(dashboard, f"{ODD}/samples")
    assert ids_of(page) == [ODD_ID]
    address = re.search(r'<td class="id"><a [^>]*href="/aerie([^"]*)"', page)[1]
    assert ODD_ID in unescape(text_of(dashboard, unescape(address)))


def test_a_drafter_shows_its_figures_and_where_it_comes_from(dashboard):
    page = text_of(dashboard, f"/drafters/{DRAFTER}")
    words = words_of(page)
    for shown in ("2.69", "2.00\u00d7", "56.2%", "1,842", "64.9 GB", "99.34%", "source.jsonl", "1 h 02 min", "1.25 G"):
        assert shown in words
    assert "unbroken" in words and f'href="/aerie{HERE}"' in page


def test_a_drafter_shows_what_is_recommended_by_what_it_was_judged_and_what_is_suspect(dashboard):
    page = words_of(text_of(dashboard, f"/drafters/{DRAFTER}"))
    for said in (
        "Recommended: 3 steps, top-k 4, 16 draft tokens",
        "Validation promised 2.82",
        "below that by 4.7",
        "but for ties",
        "no drafter was published",
        "1 suspect of 2",
        "captured [1, 30, 58], served [0, 29, 57]",
        "At temperature 0.6, as data is generated: acceptance length 2.31",
        f"./aerie deploy {DRAFTER}",
    ):
        assert said in page, said


@pytest.mark.parametrize("path", [f"/drafters/{DRAFTER}", HERE, "/"])
def test_the_report_of_the_corpus_is_found_where_people_look_for_it(dashboard, path):
    assert f'href="/aerie/editions/{JUDGED}/corpus/report"' in text_of(dashboard, path)


def test_no_page_leads_to_a_report_that_is_not_there(dashboard):
    for path in ("/", f"/runs/{RUN}", f"/editions/{EDITION}/datasets/{DATASET}", ODD):
        page = text_of(dashboard, path)
        assert f"/editions/{EDITION}/corpus/report" not in page and page.count("corpus/report") == (path == "/")


def test_the_report_is_handed_out_as_it_is_and_may_do_nothing_but_look_as_it_does(dashboard):
    with dashboard.client("viewer") as client:
        answer = client.get(f"/aerie/editions/{JUDGED}/corpus/report")
    assert answer.text == REPORT and answer.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in answer.headers["Content-Security-Policy"].split("; ") if " " in part)
    assert policy["default-src"] == "'none'" and policy["style-src"] == "'unsafe-inline'" and "script-src" not in policy
    assert answer.headers["Content-Security-Policy"].endswith("; sandbox")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_a_report_that_is_a_link_out_of_the_data_root_is_not_handed_out(dashboard, tmp_path):
    outside = tmp_path / "outside.html"
    outside.write_text("not yours")
    report = EditionFiles(dashboard.home / "data", "linked").corpus_report
    report.parent.mkdir(parents=True)
    report.symlink_to(outside)
    assert "not yours" not in text_of(dashboard, "/editions/linked/corpus/report", 404)


def test_a_drafter_that_failed_its_gates_says_which_why_and_what_to_do(dashboard):
    page = unescape(words_of(text_of(dashboard, f"/drafters/{REJECTED}")))
    told, _, below = page.partition("Training")
    for said in (
        "rejected",
        "failed 2 of 4 gates: threshold, against the drafter in production",
        "1.310 is below benchmark.minimum_acceptance_length 1.6",
        "48.8% of the 2.687",
        FOR_GATES["threshold"],
        "Usual causes: suspect are vocabulary mapping, boundary broken in the data",
        "The drafter was not published",
    ):
        assert said in told, said
    for said in (
        "0% of 500 training rows",
        FOR_CAUSES["boundary broken in the data"],
        "parity_rows is 0",
        "SGLang verifies greedily",
    ):
        assert said in below, said
    assert "./aerie deploy" not in told, "nobody is asked to serve it"
    assert FOR_CAUSES["norm position"] not in page, "nothing is to be done of what is not suspect"


def test_a_drafter_that_passed_is_not_told_as_one_that_failed(dashboard):
    page = words_of(text_of(dashboard, f"/drafters/{DRAFTER}"))
    assert "The benchmark failed" not in page and FOR_GATES["threshold"] not in page


def test_the_tab_of_a_benchmark_is_the_drafter_that_it_measured(dashboard):
    with connected(dashboard.store_url) as connection:
        record_run(connection, run_id="manual__rejected", dag_id="eagle3_pipeline", edition=JUDGED, config={})
        try:
            with dashboard.client("viewer") as client:
                answer = client.get("/aerie/tasks/manual__rejected/benchmark")
                other = client.get("/aerie/tasks/manual__rejected/export")
        finally:
            with transaction(connection) as cursor:
                cursor.execute("DELETE FROM runs WHERE run_id = 'manual__rejected'")
    assert answer.headers["Location"].endswith(f"/drafters/{REJECTED}")
    assert other.headers["Location"].endswith("/runs/manual__rejected")


def test_a_drafter_that_parts_at_ties_alone_is_not_told_as_one_that_changes_the_output(dashboard):
    for path in (f"/drafters/{DRAFTER}", "/drafters"):
        assert "but for ties" in words_of(text_of(dashboard, path)), path
    assert not re.search(r"Lossless\W+no\W", words_of(text_of(dashboard, f"/drafters/{DRAFTER}")))


def test_the_drafters_come_page_by_page(dashboard):
    with connected(dashboard.store_url) as connection:
        try:
            with transaction(connection) as cursor:
                cursor.execute(
                    "INSERT INTO drafters (drafter_id, edition, uri, state, created_at) "
                    "SELECT 'many-' || number, 'many', '', 'exported', now() + make_interval(secs => number) "
                    "FROM generate_series(1, 60) AS number"
                )
            first = text_of(dashboard, "/drafters")
            second = text_of(dashboard, link_of(first, "next"))
        finally:
            with transaction(connection) as cursor:
                cursor.execute("DELETE FROM drafters WHERE edition = 'many'")
    assert ("many-60<" in first, "many-10<" in first, link_of(first, "prev")) == (True, False, None)
    assert "many-10<" in second and DRAFTER in second and link_of(second, "next") is None
    assert link_of(second, "prev") == "/drafters?page=1"
    assert "No drafter on this page" in text_of(dashboard, "/drafters?page=2")
    text_of(dashboard, "/drafters?page=0", status=422)


def test_a_drafter_that_nobody_measured_shows_no_figure_as_zero(dashboard):
    words = words_of(text_of(dashboard, f"/drafters/{UNMEASURED}"))
    assert "Not measured yet" in words and "not known" in words and "0.00" not in words


@contextmanager
def changed(dashboard, there, back):
    """Something else in the store for a while; both are statements about the sample ``LOOPING``."""
    with connected(dashboard.store_url) as connection:
        with transaction(connection) as cursor:
            cursor.execute(there, {"id": LOOPING})
        try:
            yield
        finally:
            with transaction(connection) as cursor:
                cursor.execute(back, {"id": LOOPING})


def test_a_text_of_an_earlier_verdict_says_so(dashboard):
    with changed(
        dashboard,
        "UPDATE samples SET state = 'pending' WHERE sample_id = %(id)s",
        "UPDATE samples SET state = 'quarantined' WHERE sample_id = %(id)s",
    ):
        assert "Of an earlier verdict" in text_of(dashboard, sample_path(LOOPING))
    assert "Of an earlier verdict" not in text_of(dashboard, sample_path(LOOPING))


def test_a_preview_that_cannot_be_read_is_an_error_on_the_page(dashboard):
    with changed(
        dashboard,
        "UPDATE previews SET document = jsonb_build_object('whole', document) WHERE sample_id = %(id)s",
        "UPDATE previews SET document = document -> 'whole' WHERE sample_id = %(id)s",
    ):
        page = words_of(text_of(dashboard, sample_path(LOOPING)))
    assert "spans: Field required" in page and f"previews, {JUDGED}/{DATASET}/{LOOPING}" in page and "1,234" not in page
