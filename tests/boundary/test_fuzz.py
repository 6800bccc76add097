"""Fuzz target: files and rows of all kinds, some broken on purpose. Only our own errors, and the right exit code.

Every case follows from its number, so that a failure is found again. ``AERIE_FUZZ_CASES`` asks for more of them.
"""

import gzip
import io
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from aerie.boundary.files import FileJudge
from aerie.boundary.validating import validate_files

from .test_files import F

CASES = int(os.environ.get("AERIE_FUZZ_CASES", "400"))
JUDGE = FileJudge.of("kimi_k25")
KEPT, NOT_KEPT, UNREADABLE = 0, 1, 2

SPECIAL = [F.open, F.close, F.end, F.section_begin, F.section_end, F.call_begin, F.argument_begin, F.call_end]
ANYTHING: list[Any] = [
    None, True, False, 0, -1, 1.5, 1e300, 2**63, -(2**70), "", "x", "\ud800", "\u202e", [], [[]], [None], {},
    {"type": 1}, {"type": "stop"}, [1, "2"], "[1]", {"a": {"b": []}}, b"\xff", [True], [2.5], "[" * 5000, "{}",
]  # fmt: skip
FIELDS = ("prompt_ids", "output_ids", "finish_reason", "completion_tokens", "max_new_tokens", "tools", "id", "messages",
          "usage")  # fmt: skip


def good_row(random_: random.Random) -> dict[str, Any]:
    text = random_.sample(F.text, 12)
    output = [*text[:5], F.close, *text[5:8]]
    if random_.random() < 0.5:
        output += F.section(F.call())
    output.append(F.end)
    row: dict[str, Any] = {"prompt_ids": F.prompt, "output_ids": output, "finish_reason": "stop"}
    known = {
        "completion_tokens": len(output),
        "max_new_tokens": 99,
        "id": random_.choice(["a", "b", None]),
        "tools": "[]",
    }
    return {**row, **{name: value for name, value in known.items() if random_.random() < 0.5}}


def odd_row(random_: random.Random) -> dict[str, Any]:
    """Integers where integers belong: judged, whatever they are."""
    numbers = [*SPECIAL, *F.text[:9], -1, 2**40, 2**80]
    return {
        "prompt_ids": random_.choices(numbers, k=random_.randrange(9)),
        "output_ids": random_.choices(numbers, k=random_.randrange(60)),
        "finish_reason": random_.choice([None, "stop", "length", "abort", {"type": "length"}, "tool_calls"]),
        "max_new_tokens": random_.choice([None, 1, 30, 2**70]),
    }


def broken_row(random_: random.Random) -> dict[str, Any]:
    """Anything in any field."""
    row = {**good_row(random_), **{random_.choice(FIELDS): random_.choice(ANYTHING) for _ in range(2)}}
    if random_.random() < 0.3:
        row.pop(random_.choice(list(row)))
    if random_.random() < 0.2:
        row["messages"] = [{"role": "assistant", **{random_.choice(["content", "reasoning", "tool_calls"]): value}}
                           for value in random_.sample(ANYTHING, 2)]  # fmt: skip
        row.pop("output_ids", None)
    return row


def as_lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, default=repr) + "\n" for row in rows).encode()


def as_parquet(rows: list[Any]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


WRITERS: list[Callable[[list[Any]], bytes]] = [
    as_lines, lambda rows: gzip.compress(as_lines(rows)), lambda rows: zstandard.compress(as_lines(rows)), as_parquet,
]  # fmt: skip


def damaged(data: bytes, random_: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(random_.randrange(1, 6)):
        at = random_.randrange(len(changed)) if changed else 0
        match random_.randrange(4):
            case 0:
                changed[at : at + 1] = bytes([random_.randrange(256)])
            case 1:
                del changed[at : at + random_.randrange(1, 40)]
            case 2:
                changed[at:at] = random_.randbytes(random_.randrange(1, 20))
            case _:
                del changed[at:]
    return bytes(changed)


def exit_code_and_verdicts(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[dict[str, Any]], list[str]]:
    said: list[str] = []
    code = validate_files([path], JUDGE, as_json=True, say=said.append)
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()], said


@pytest.mark.parametrize("block", range(4))
def test_whatever_a_file_holds_the_exit_code_says_what_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], block: int
) -> None:
    for case in range(block * CASES // 4, (block + 1) * CASES // 4):
        random_ = random.Random(case)
        makers = random_.choices([good_row, odd_row, broken_row], weights=[3, 1, 1], k=random_.randrange(1, 8))
        rows = [maker(random_) for maker in makers]
        data = as_lines(rows)
        if random_.random() < 0.5:
            data = damaged(data, random_)
        path = tmp_path / f"{case}"
        path.write_bytes(random_.choice([bytes, gzip.compress, zstandard.compress])(data))
        code, verdicts, said = exit_code_and_verdicts(path, capsys)
        expected = UNREADABLE if said else NOT_KEPT if any(v["verdict"] != "kept" for v in verdicts) else KEPT
        assert code == expected, f"case {case}"
        assert all((v["verdict"] == "kept") == (not v["reasons"]) for v in verdicts), f"case {case}"
        assert [v["row"] for v in verdicts] == sorted({v["row"] for v in verdicts}), f"case {case}"
        assert all(str(path) in message for message in said), f"case {case}"


def test_rows_of_a_known_kind_give_their_exit_code_in_every_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for case in range(CASES // 4):
        random_ = random.Random(case)
        rows = [good_row(random_) for _ in range(random_.randrange(1, 5))]
        wrong = {**good_row(random_), "output_ids": [F.text[0], F.end], "completion_tokens": 2}
        mixed = [*rows, wrong]
        random_.shuffle(mixed)
        for number, writer in enumerate(WRITERS):
            path = tmp_path / "file"
            for content, expected in ((rows, KEPT), (mixed, NOT_KEPT)):
                path.write_bytes(writer(content))
                code, verdicts, said = exit_code_and_verdicts(path, capsys)
                assert (code, said) == (expected, []), f"case {case}, form {number}"
                assert [v["verdict"] == "kept" for v in verdicts] == [row is not wrong for row in content]


def test_parquet_columns_of_any_type_are_judged_or_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = 0
    for case in range(CASES):
        try:
            (tmp_path / "file").write_bytes(as_parquet([broken_row(random.Random(case))] * 2))
        except (pa.ArrowException, OverflowError, UnicodeEncodeError):
            continue  # nothing that Parquet can hold
        written += 1
        code, verdicts, said = exit_code_and_verdicts(tmp_path / "file", capsys)
        assert (code == UNREADABLE) == bool(said), f"case {case}"
        assert said or len(verdicts) == 2, f"case {case}"
    assert written > CASES // 4


def test_a_damaged_parquet_or_compressed_file_never_raises_and_never_passes_rows_that_it_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for case in range(CASES // 2):
        random_ = random.Random(case)
        rows = [good_row(random_) for _ in range(20)]
        path = tmp_path / "file"
        path.write_bytes(damaged(random_.choice(WRITERS[1:])(rows), random_))
        code, verdicts, said = exit_code_and_verdicts(path, capsys)
        assert code in (KEPT, NOT_KEPT, UNREADABLE) and (code == UNREADABLE) == bool(said), f"case {case}"
        assert said or len(verdicts) == len(rows), f"case {case}: rows were lost without a word"
