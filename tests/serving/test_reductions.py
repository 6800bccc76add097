"""A plan that runs out of memory: made smaller once, by what fits the phase, and never without saying so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aerie.errors import BadInput
from aerie.serving import client
from aerie.serving.client import ServerHandle
from aerie.serving.configured import ensure_or_smaller
from aerie.serving.errors import (
    OutOfMemoryAtStart,
    OutOfMemoryInDecode,
    OutOfMemoryInPrefill,
    ServerDied,
)
from aerie.serving.plan import ServerPlan
from aerie.serving.probing import Probing
from aerie.serving.reductions import reduced, reductions_path, smaller
from aerie.serving.server_log import ServerLog

from . import server_logs
from .helpers import until

Make = Callable[..., ServerPlan]


class Asking:
    """Asks for servers as a stage does, through the real keeper, and keeps what it is told."""

    def __init__(self, folder: Path, python: Path, probing: Probing) -> None:
        self.folder, self._python, self._probing = folder, python, probing
        self.reports: list[str] = []
        self.alerts: list[tuple[str, str]] = []

    def __call__(self, plan: ServerPlan) -> ServerHandle:
        def ensure(asked: ServerPlan) -> ServerHandle:
            return client.ensure_server(
                asked.model_copy(update={"probing": self._probing}),
                folder=self.folder,
                owner="a test",
                python=self._python,
                lease_seconds=60.0,
                start_timeout_seconds=30.0,
                report=self.reports.append,
            )

        return ensure_or_smaller(
            plan, ensure, folder=self.folder, report=self.reports.append, alert=lambda *alert: self.alerts.append(alert)
        )

    @property
    def served(self) -> ServerPlan:
        lease = client.status(self.folder)
        assert lease is not None
        return lease.plan


def state(folder: Path) -> str | None:
    lease = client.status(folder)
    return None if lease is None else lease.state


@pytest.fixture
def ask(folder: Path, fake_python: Path, probing: Probing) -> Asking:
    return Asking(folder, fake_python, probing)


@pytest.mark.parametrize(
    ("behaviour", "change"),
    [
        ("pool too large", {"mem_fraction_static": 0.83}),
        ("prefill too large", {"chunked_prefill_size": 4096}),
    ],
)
def test_start_that_runs_out_of_memory_is_tried_once_more_smaller(
    ask: Asking, fake_plan: Make, behaviour: str, change: dict[str, Any]
) -> None:
    plan = fake_plan(behaviour)
    ask(plan)
    assert ask.served.model_dump(include=set(change)) == change
    assert any("trying once more, smaller" in line and "CUDA out of memory" in line for line in ask.reports)
    ((reason, message),) = ask.alerts
    assert reason == "out_of_memory"
    for name, value in change.items():
        assert f"{name} {value} (instead of" in message
    assert "CUDA out of memory" in message
    lease = client.status(ask.folder)
    assert lease is not None
    assert lease.reduction is not None
    assert lease.reduction in message


def test_server_that_was_ready_comes_back_smaller_at_the_next_try(ask: Asking, fake_plan: Make) -> None:
    plan = fake_plan("decode too large later")
    handle = ask(plan)
    assert ask.alerts == []
    assert until(lambda: reductions_path(ask.folder).exists() and state(ask.folder) == "failed")
    with pytest.raises(ServerDied, match=r"lower serving\.max_running_requests"):
        client.renew(handle)
    second = ask(plan)
    assert not second.reused
    assert ask.served.max_running_requests == 36  # half of the 72 that ran
    assert [reason for reason, _ in ask.alerts] == ["out_of_memory"]


def test_smaller_plan_is_remembered_and_shared(ask: Asking, fake_plan: Make) -> None:
    plan = fake_plan("prefill too large")
    first = ask(plan)
    second = ask(plan)
    assert second.reused
    assert second.launch_token == first.launch_token
    assert len(ask.alerts) == 1
    assert "is smaller than planned" in ask.reports[-1]
    ask(fake_plan("healthy"))  # another plan is served as it is
    assert ask.served.chunked_prefill_size is None
    lease = client.status(ask.folder)
    assert lease is not None
    assert lease.reduction is None
    ask(plan)
    assert ask.served.chunked_prefill_size == 4096
    assert len(ask.alerts) == 2


def test_plan_is_not_made_smaller_twice(ask: Asking, fake_plan: Make) -> None:
    plan = fake_plan("prefill always too large")
    with pytest.raises(OutOfMemoryInPrefill):
        ask(plan)
    assert sum("trying once more" in line for line in ask.reports) == 1
    ask.reports.clear()
    with pytest.raises(OutOfMemoryInPrefill):
        ask(plan)
    assert not any("trying once more" in line for line in ask.reports)
    assert list(json.loads(reductions_path(ask.folder).read_text())) == [plan.fingerprint()]


# What is made smaller


def log_of(tmp_path: Path, text: str = "") -> ServerLog:
    path = tmp_path / "server.log"
    path.write_text(text)
    log = ServerLog(path)
    log.read()
    return log


@pytest.mark.parametrize(
    ("plan", "change"),
    [
        ({"mem_fraction_static": 0.93}, {"mem_fraction_static": 0.88}),
        ({"mem_fraction_static": 0.08}, {"mem_fraction_static": 0.04}),
        (
            {"mem_fraction_static": 0.5, "max_total_tokens": 100_000},
            {"mem_fraction_static": 0.45, "max_total_tokens": 90_000},
        ),
    ],
)
def test_after_a_failed_start_the_pool_is_smaller(
    make_plan: Make, tmp_path: Path, plan: dict[str, Any], change: dict[str, Any]
) -> None:
    assert smaller(make_plan(**plan), OutOfMemoryAtStart(""), log_of(tmp_path)) == change


@pytest.mark.parametrize(
    ("size", "change"),
    [
        (16384, {"chunked_prefill_size": 4096}),
        (4096, {"chunked_prefill_size": 2048}),
        (3000, {"chunked_prefill_size": 2048}),
        (2048, {"mem_fraction_static": 0.83}),
        (None, {"chunked_prefill_size": 4096}),
    ],
)
def test_after_a_failed_prefill_its_parts_are_smaller(
    make_plan: Make, tmp_path: Path, size: int | None, change: dict[str, Any]
) -> None:
    plan = make_plan(chunked_prefill_size=size)
    assert smaller(plan, OutOfMemoryInPrefill(""), log_of(tmp_path)) == change


def test_parts_of_a_prompt_stay_whole_pages(make_plan: Make, tmp_path: Path) -> None:
    plan = make_plan(chunked_prefill_size=9216, page_size=96)
    assert smaller(plan, OutOfMemoryInPrefill(""), log_of(tmp_path)) == {"chunked_prefill_size": 4032}


def test_what_sglang_chose_is_where_making_smaller_begins(make_plan: Make, tmp_path: Path) -> None:
    log = log_of(tmp_path, server_logs.READY.replace("chunked_prefill_size=8192", "chunked_prefill_size=4096"))
    assert smaller(make_plan(), OutOfMemoryInPrefill(""), log) == {"chunked_prefill_size": 2048}
    assert smaller(make_plan(), OutOfMemoryInDecode(""), log) == {"max_running_requests": 1024}


@pytest.mark.parametrize(
    ("limit", "change"),
    [
        (64, {"max_running_requests": 32}),
        (None, {"max_running_requests": 36}),
        (500, {"max_running_requests": 36}),
        (1, {"mem_fraction_static": 0.83}),
    ],
)
def test_after_a_failed_decode_half_of_what_ran_may_run(
    make_plan: Make, tmp_path: Path, limit: int | None, change: dict[str, Any]
) -> None:
    log = log_of(tmp_path, server_logs.READY + server_logs.DECODES)
    assert smaller(make_plan(max_running_requests=limit), OutOfMemoryInDecode(""), log) == change


def test_damaged_record_names_its_file(make_plan: Make, tmp_path: Path) -> None:
    reductions_path(tmp_path).write_text("{")
    with pytest.raises(BadInput, match=r"reductions\.json: not reductions of plans.*remove it"):
        reduced(tmp_path, make_plan())
