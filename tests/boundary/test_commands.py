"""``validate`` and ``show`` as a person runs them: what goes where, and the exit codes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aerie.boundary.files import FileJudge
from aerie.boundary.showing import shown
from aerie.boundary.validating import PROBLEMS_SAID, validate_files
from aerie.settings.machine import PROJECT_ROOT

from .test_files import ROWS, written

KEPT, WRONG = ROWS


def aerie(*arguments: str, folder: Path, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_ROOT / "include"), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "aerie", *arguments], cwd=folder, env=environment, text=True, capture_output=True,
        check=False, timeout=120, **options,  # type: ignore[call-overload]
    )  # fmt: skip


def test_exit_code_says_kept_not_kept_or_unreadable_and_the_worst_of_all_files_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge, said = FileJudge.of("kimi_k25"), list[str]()
    good = written(tmp_path / "good.jsonl", [KEPT])
    mixed = written(tmp_path / "mixed.parquet", [KEPT, WRONG])
    broken = written(tmp_path / "broken.jsonl", [KEPT])
    broken.write_text("nonsense\n" + broken.read_text())

    def code(*paths: Path, as_json: bool = True) -> int:
        return validate_files(paths, judge, as_json=as_json, say=said.append)

    assert (code(good), code(good, mixed), code(mixed, good)) == (0, 1, 1)
    assert said == []
    assert code(mixed, broken, tmp_path / "none.jsonl", good) == 2
    assert len(said) == 2, "one message for the row, one for the file"
    assert f"{broken}, row 0" in said[0] and "none.jsonl" in said[1]
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()][-4:]
    assert [(Path(row["file"]).name, row["row"]) for row in rows] == [
        ("mixed.parquet", 0), ("mixed.parquet", 1), ("broken.jsonl", 1), ("good.jsonl", 0),
    ], "what can be read is judged, in order, whatever else cannot"  # fmt: skip


def test_summary_counts_reasons_with_rows_to_look_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "rows.jsonl", [KEPT, *[WRONG] * 7])
    assert validate_files([path], FileJudge.of("kimi_k25"), as_json=False, say=print) == 1
    text = capsys.readouterr().out
    assert "8 rows judged, 1 kept, 7 quarantined, 0 unreadable" in text
    assert re.search(r"no_close +corrupt +7 +87\.5% +1, 2, 3, 4, 5", text)
    assert re.search(r"not checked in all rows: .*foreign_special_token", text)


def test_a_file_full_of_broken_rows_does_not_fill_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("nonsense\n" * (PROBLEMS_SAID + 30))
    said: list[str] = []
    assert validate_files([tmp_path / "rows.jsonl"], FileJudge.of("kimi_k25"), as_json=True, say=said.append) == 2
    assert len(said) == PROBLEMS_SAID + 1 and "30 more rows" in said[-1]


def test_verdicts_alone_go_to_the_standard_output_and_a_pipe_can_be_judged(tmp_path: Path) -> None:
    lines = json.dumps(KEPT) + "\nnonsense\n"
    done = aerie("validate", "-", "--profile", "kimi_k25", "--json", folder=tmp_path, input=lines)
    assert done.returncode == 2
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ["a"]
    assert "aerie: -, row 1 (line 2): not JSON" in done.stderr and "Traceback" not in done.stderr


def test_unknown_profile_is_told_with_the_known_ones(tmp_path: Path) -> None:
    done = aerie("validate", "rows.jsonl", "--profile", "kimi", folder=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert "no profile named 'kimi'" in done.stderr and "kimi_k25" in done.stderr


def test_option_that_only_a_tokenizer_reads_is_refused_without_one(tmp_path: Path) -> None:
    written(tmp_path / "rows.jsonl", ROWS)
    done = aerie("validate", "rows.jsonl", "--profile", "kimi_k25", "--trust-remote-code", folder=tmp_path)
    assert done.returncode == 2 and "--tokenizer" in done.stderr and not done.stdout


def test_tokenizer_decides_what_needs_text(tmp_path: Path) -> None:
    from .families import TINY_VERIFIER, family

    demo = family("demo")
    called = {"prompt_ids": demo.prompt, "output_ids": [301, demo.close, *demo.section(demo.call()), demo.end],
              "finish_reason": "stop"}  # fmt: skip
    path = written(tmp_path / "rows.jsonl", [called])
    done = aerie(
        "validate", path.name, "--profile", "demo", "--tokenizer", str(TINY_VERIFIER), "--json", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert {"tool_id_malformed", "tool_arguments_not_json"} <= {*verdict["flags"]}
    assert "foreign_special_token" not in verdict["unchecked"]


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("a\n\tb", "a\n\tb"),
        ("\x1b[31mred\x07", "<U+001B>[31mred<U+0007>"),
        ("\u202etxt.exe", "<U+202E>txt.exe"),
        ("\r\x9b2J", "<U+000D><U+009B>2J"),
        ("[bold]no markup[/bold] :smile:", "[bold]no markup[/bold] :smile:"),
        ("日本\u2028", "日本<U+2028>"),
    ],
)
def test_text_of_a_sample_cannot_act_on_the_terminal(text: str, visible: str) -> None:
    assert shown(text) == visible
