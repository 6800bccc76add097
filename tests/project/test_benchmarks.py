"""The benchmarks, as far as they can be checked without running them."""

import runpy

from aerie.settings.machine import PROJECT_ROOT

DASHBOARD = PROJECT_ROOT / "benchmarks" / "dashboard_queries.py"


def test_every_query_that_a_page_makes_is_timed_on_a_store_of_a_year() -> None:
    """A query that is named here wants an entry in ``queries`` of the benchmark, and its table filled."""
    benchmark = runpy.run_path(str(DASHBOARD))
    timed = benchmark["queries"](connection=None, session=None, decoded="id")
    assert benchmark["not_timed"](timed) == []
    timed.pop("one run")
    assert benchmark["not_timed"](timed) == ["read_run"], "a query that is left out is not noticed"
