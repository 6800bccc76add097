"""``report.html``: one file that any browser shows, with what the corpus holds."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from aerie.artefacts.corpus import iterate_rows
from aerie.corpus.report import histograms
from aerie.corpus.stage import merge
from aerie.corpus.tally import DatasetStatistics

from .conftest import sample


class Page(HTMLParser):
    """Tags that are open, what refers to something else, and the page's text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += f"{data} "


@pytest.fixture
def page(two_datasets):
    edition = two_datasets(rows=60)
    manifest = merge(edition.request(), edition.events).manifest
    html = manifest.output("report.html").read_text()
    return Page(html), html, manifest.counts, edition


def test_the_report_is_one_file_that_needs_no_network_and_no_script(page):
    parsed, html, _, _ = page
    assert parsed.open == []
    assert parsed.references == []
    assert "script" not in parsed.tags
    assert not re.search(r"https?://|@import|url\(", html)


def test_the_report_tells_rows_lengths_budgets_drops_and_coverage_of_every_data_set(page):
    parsed, html, counts, _ = page
    for name, one in counts["datasets"].items():
        assert f"<td>{name}</td><td>{one['rows']:,}</td><td>{one['tokens']:,}</td>" in html
        assert f'aria-label="tokens of a row of {name}"' in html
        assert f'aria-label="tokens of a response of {name}"' in html
        assert f"{one['response_tokens']:,} of 10,000,000 (0%)" in html
    assert parsed.tags.count("polyline") == 1 + len(counts["datasets"])
    for told in (counts["corpus_fingerprint"], "copy_of_held_out", "over_cap", f"{counts['distinct_tokens']:,}"):
        assert told in parsed.text


def test_statistics_are_those_of_the_rows_that_are_in_the_corpus(page):
    _, _, counts, edition = page
    rows = [row for row in iterate_rows(edition.request().files.corpus / "dataset") if row.dataset == "B1_glaive"]
    lengths = [len(row.input_ids) for row in rows]
    one = counts["datasets"]["B1_glaive"]
    assert (one["rows"], one["tokens"]) == (len(rows), sum(lengths))
    assert one["length_percentiles"]["p50"] == np.percentile(lengths, 50, method="lower")
    trained = {token for row in rows for token in row.input_ids[row.loss_mask == 1].tolist()}
    assert one["distinct_tokens"] == len(trained)


def test_every_row_is_in_one_bar_and_bars_are_the_same_for_all_data_sets():
    random = np.random.default_rng(0)
    statistics = {
        name: DatasetStatistics(lengths.astype(np.int32), (lengths // 2).astype(np.int32), 0, {})
        for name, lengths in (("a", random.integers(2, 9000, 500)), ("b", random.integers(2, 30, 20)))
    }
    found = histograms(statistics)
    for name, one in statistics.items():
        assert sum(bar.rows for bar in found[name]["row"]) == len(one.lengths)
        assert sum(bar.rows for bar in found[name]["response"]) == len(one.response_lengths)
    assert [(bar.low, bar.high) for bar in found["a"]["row"]] == [(bar.low, bar.high) for bar in found["b"]["response"]]


def test_reasoning_share_counts_the_rows_that_stay(edition):
    kept = replace(sample("a", [1], [2, 3, 4, 5]), reasoning_tokens=3)
    edition.validated("B1_glaive", [kept, replace(sample("long", [1], [2] * 40), reasoning_tokens=40)])
    counts = merge(edition.request(datasets=("B1_glaive",)), edition.events).manifest.counts
    assert counts["datasets"]["B1_glaive"]["reasoning_share"] == 0.75
