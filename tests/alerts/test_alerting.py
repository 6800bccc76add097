import subprocess
import sys

import pytest

from aerie.alerting import Alert, FailedTask, first_useful_line, run_failure
from aerie.errors import BadInput, Failed
from aerie.masking import masked
from aerie.settings.machine import PROJECT_ROOT

INCLUDE = PROJECT_ROOT / "include"
FULL = Alert(
    reason="quarantine_rate",
    message="main/B3_magicoder: 31.0% of the last 200 responses",
    run_id="manual__1",
    edition="main",
    dataset="B3_magicoder",
    stage="generate",
    task_id="B3_magicoder.generate",
    try_number=2,
    log_url="http://airflow/dags/d/runs/r/tasks/t?try_number=2",
)


def test_a_message_says_data_set_reason_first_useful_line_and_log():
    assert FULL.title == "Aerie: quarantine rate (B3_magicoder)"
    assert FULL.body.splitlines() == [
        "main/B3_magicoder: 31.0% of the last 200 responses",
        "",
        "Data set: B3_magicoder",
        "Edition: main",
        "Reason: quarantine_rate",
        "Task: B3_magicoder.generate, try 2",
        "Run: manual__1",
        "Log: http://airflow/dags/d/runs/r/tasks/t?try_number=2",
    ]


def test_what_is_not_known_of_an_alert_makes_no_empty_line():
    assert Alert(reason="test", message="hello").body == "hello\n\nReason: test"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (BadInput("config.yaml: no data set B9\nand more"), "config.yaml: no data set B9"),
        (Failed(""), "Failed"),
        (KeyError("tokens"), "KeyError: 'tokens'"),
        (ValueError("\n  second line is the first\n"), "ValueError: second line is the first"),
        ('Traceback (most recent call last):\n  File "x"\nKeyError: 1', "KeyError: 1"),
        ("", "no message"),
    ],
)
def test_the_line_of_an_error_is_the_one_that_says_what_is_wrong(error, line):
    assert first_useful_line(error) == line


def test_an_error_of_a_thousand_words_stays_one_readable_line():
    assert len(first_useful_line("word " * 1000)) == 600


def test_a_failed_run_says_its_first_cause_and_only_counts_what_was_not_run():
    assert run_failure([FailedTask("plan", "no room")], not_run=27, reason="task_failure") == (
        "plan failed: no room; 27 tasks were not run because of that"
    )
    failed = [FailedTask("B1_glaive.generate", "canary"), *(FailedTask(f"B{n}") for n in range(2, 7))]
    assert run_failure(failed, not_run=0, reason="task_failure") == (
        "B1_glaive.generate failed: canary; so did B2, B3, B4, 2 more"
    )
    assert "timed out" in run_failure([], not_run=3, reason="timed_out")


@pytest.mark.parametrize(
    "text",
    [
        "database postgresql://aerie:{}@127.0.0.1:5432/aerie refuses",
        "database postgresql://aerie:p@ss-{}@127.0.0.1:5432/aerie refuses",
        "clone of https://{}@huggingface.co/org/model",
        "GET https://bucket.host/part?X-Amz-Signature={}&x=1 gave 403",
        "GET https://host/file?token={}",
        "GET https://host/file?page=2&api_key={}#end",
        "login failed: password={}, user=aerie",
        '{{"api_key": "{}", "model": "kimi"}}',
        "header Authorization: Bearer {}",
    ],
)
def test_a_secret_of_a_stage_stays_out_of_what_people_read(text):
    secret = "s3cr3t-value-0123456789"
    assert secret not in masked(text.format(secret))
    assert secret not in Alert(reason="x", message=text.format(secret)).message


@pytest.mark.parametrize("text", ["9DB_PASSWORD={}", "_api_key: {}", "2-step://{}@host"])
def test_a_name_or_a_scheme_that_begins_oddly_hides_no_secret_from_the_mask(text):
    secret = "s3cr3t-value-0123456789"
    assert secret not in masked(text.format(secret))


@pytest.mark.parametrize("unit", ["a-", "a", "?keykey", "?token", "://a", "password ", "password='"])
def test_no_text_takes_the_square_of_its_length_to_mask(unit):
    program = f"from aerie.masking import masked; masked(({unit!r} * 262144)[:262144])"
    # A part of a second; where every start searches the rest anew, it is a quarter of an hour.
    subprocess.run([sys.executable, "-c", program], cwd=INCLUDE, check=True, timeout=60)


def test_a_long_parameter_is_masked_by_any_word_in_its_name():
    text = f"http://h/?{'key' * 40000}=hush-hush&a=b"
    assert masked(text) == f"http://h/?{'key' * 40000}=***&a=b"


@pytest.mark.parametrize(
    "text",
    [
        "the token 163606 opens reasoning; max_tokens=8192, tokens=4,096, token usage: 0.96",
        "server http://127.0.0.1:30000/generate is ready; see a@b.org",
        "Progress: 9860/10000 (0 errors), tokens of budget: 1,000/10,000 (10.0%)",
        "eos_token_id=163586, launch_token=5f3a",
        "http://airflow:8080/dags/d/runs/manual__2026-11-29T17:40:41.493824+00:00/tasks/t?try_number=2",
    ],
)
def test_what_is_no_secret_stays_readable(text):
    assert masked(text) == text
