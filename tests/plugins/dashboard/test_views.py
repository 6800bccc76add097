"""How figures are written, and how several states become one."""

from datetime import UTC, datetime

import pytest

from aerie_dashboard.airflow_tasks import Task, joint_state, seconds_of
from aerie_dashboard.charts import Chart
from aerie_dashboard.formatting import UNKNOWN, compact, duration, known, number, share, size, time_left
from aerie_dashboard.run_view import stage_lines
from aerie_dashboard.server_view import plan_of

from ...dashboard import plan_document


def task(task_id, state, began=0, ended=10):
    moments = [datetime.fromtimestamp(second, UTC) if second is not None else None for second in (began, ended)]
    return Task(task_id, state, *moments)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (number(1234567), "1,234,567"), (number(2.6876), "2.69"), (number(3e-5, 3), "3e-05"), (number(0.0), "0.00"),
        (compact(9_999), "9,999"),
        (compact(81_600), "81.6 k"),
        (compact(999_999), "1.00 M"), (size(64_897_904), "64.9 MB"), (size(512), "512 B"),
        (duration(3725), "1 h 02 min"),
        (duration(1.23), "1.2 s"), (duration(59.7), "1 min 00 s"), (duration(90_000), "1 d 1 h"),
        (share(0.12345), "12.3%"),
        (time_left(60, None), "more than 1 min 00 s"), (time_left(60, 60), "1 min 00 s"), (number(None), UNKNOWN),
        (known(share(None)), "not known"), (number(0), "0"),
    ],
)  # fmt: skip
def test_figures_are_written_with_separators_and_units(written, expected):
    assert written == expected


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["success", "failed", "running"], "failed"), (["success", "running", None], "running"),
        (["success", "skipped"], "success"), (["skipped", "skipped"], "skipped"), ([None, None], "waiting"),
        (["success", "up_for_retry"], "up_for_retry"), (["success", None], "running"), ([], "waiting"),
    ],
)  # fmt: skip
def test_the_state_of_a_stage_is_that_of_its_worst_task(states, expected):
    assert joint_state([task(f"B{index}.generate", state) for index, state in enumerate(states)]) == expected


def test_a_stage_takes_from_its_first_beginning_to_its_last_end():
    tasks = [task("B1.generate", "success", 5, 20), task("B2.generate", "success", 10, 65)]
    assert seconds_of(tasks) == 60
    assert seconds_of([task("B1.generate", None, None, None)]) is None


def test_stages_count_their_tasks_and_name_the_one_that_failed():
    tasks = [
        task("B1.prepare", "success"),
        task("A1.import", "failed"),
        task("B2.prepare", "skipped"),
        task("plan", "success"),
    ]
    lines = {line.name: line for line in stage_lines(tasks, (), "r")}
    assert (lines["prepare"].done, lines["prepare"].total, lines["prepare"].task_id) == (1, 2, "A1.import")
    assert lines["plan"].state == "success" and lines["merge"].state == "waiting"


def test_a_run_that_airflow_no_longer_has_shows_what_its_manifests_say():
    manifests = [{"stage": "import", "run_id": "r"}, {"stage": "merge", "run_id": "other"}]
    lines = {line.name: line.state for line in stage_lines((), manifests, "r")}
    assert (lines["prepare"], lines["merge"]) == ("success", "not known")


def test_a_series_that_does_not_fit_its_chart_is_refused():
    with pytest.raises(ValueError, match="2 values for 1 labels"):
        Chart(kind="line", title="t", labels=("a",), series=({"name": "s", "values": (1, 2)},))


@pytest.mark.parametrize(
    ("changes", "device"), [({"gpus": 8}, "each GPU"), ({"gpus": 0}, "the host"), ({"gpus": None}, "each GPU")]
)
def test_a_plan_without_gpus_is_not_told_as_one_of_gpus(changes, device):
    row = {"document": {**plan_document(), **changes}, "recorded_at": datetime.now(UTC)}
    assert plan_of(row, "run").device.title == f"Memory of {device} by phase, of 95.6 GiB"


def test_states_of_unfinished_samples_are_a_part_of_the_hosts_memory_and_not_of_what_is_free():
    document = plan_document()
    before = plan_of({"document": document, "recorded_at": datetime.now(UTC)}, "run").host
    assert [series.name for series in before.series] == ["loading", "hierarchical cache", "free"]
    document["phases"]["generate"]["host_states_gb"] = 17.18
    bars = {
        one.name: one.values
        for one in plan_of({"document": document, "recorded_at": datetime.now(UTC)}, "run").host.series
    }
    assert bars["states of unfinished samples"] == (17.18, 0, 0)
    assert bars["free"] == (pytest.approx(200 - 17.18), 200, 200)
