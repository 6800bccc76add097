"""What a person reads when a server fails: each known message, and what is not known."""

import re
from pathlib import Path

import pytest

from aerie.serving.errors import LaunchFailed
from aerie.serving.failures import KNOWN
from aerie.serving.server_log import ServerLog
from aerie.settings.pipeline import ServingSettings, VerifierSettings

from . import server_logs
from .server_logs import FAILING, Failing


def explained(tmp_path: Path, text: str, status: int | None = None):
    path = tmp_path / "server.log"
    path.write_text(text)
    log = ServerLog(path)
    log.read()
    return log.explain(status)


@pytest.mark.parametrize("failing", FAILING, ids=lambda failing: failing.name)
def test_known_failure_comes_with_its_remedy(tmp_path: Path, failing: Failing) -> None:
    explanation = explained(tmp_path, failing.log, failing.status)
    assert failing.advice in str(explanation)
    assert explanation.error is failing.error
    assert f"(log: {tmp_path / 'server.log'})" in str(explanation)


def test_every_known_failure_has_a_log_that_shows_it(tmp_path: Path) -> None:
    shown = {id(explained(tmp_path, failing.log, failing.status).known) for failing in FAILING}
    assert [known.says for known in KNOWN if id(known) not in shown] == []


def test_a_remedy_names_settings_that_are_there() -> None:
    fields = {"serving": ServingSettings.model_fields, "verifier": VerifierSettings.model_fields}
    for known in KNOWN:
        for group, field in re.findall(r"\b(serving|verifier)\.(\w+)", known.advice):
            assert field in fields[group], known.says


def test_server_that_runs_shows_no_failure(tmp_path: Path) -> None:
    healthy = server_logs.READY + server_logs.PREFILLS + server_logs.DECODES
    assert explained(tmp_path, healthy).known is None


def test_real_server_without_a_gpu_shows_no_failure(tmp_path: Path) -> None:
    healthy = (Path(__file__).parent / "healthy_cpu_server.log").read_text()
    assert explained(tmp_path, healthy).known is None


def test_unknown_failure_is_told_by_its_last_exception(tmp_path: Path) -> None:
    text = server_logs.LOADED + server_logs.hit(server_logs.RUNS, "fancy.NewError: the moon is full\nand bright")
    parents = server_logs.traceback((), "RuntimeError: Initialization failed. Please see the error messages above.")
    explanation = explained(tmp_path, text + parents, status=1)
    assert explanation.known is None
    assert explanation.error is LaunchFailed
    assert str(explanation) == f"fancy.NewError: the moon is full (log: {tmp_path / 'server.log'})"


def test_server_that_ends_without_an_exception_is_told_by_its_last_line(tmp_path: Path) -> None:
    assert "its log ends with: bye" in str(explained(tmp_path, "hello\nbye\n", status=1))
    assert "it logged nothing" in str(explained(tmp_path, "", status=1))


def test_what_a_line_says_is_told_without_its_time(tmp_path: Path) -> None:
    killed = next(failing for failing in FAILING if failing.name == "worker killed later")
    assert explained(tmp_path, killed.log).said.startswith("Subprocess scheduler_0 (pid=8696) crashed")


def test_a_warning_from_the_time_of_loading_is_not_the_cause(tmp_path: Path) -> None:
    text = "ImportError: no fast kernel, going on without\n" + "loading\n" * 3000 + "the last thing it said\n"
    assert "the last thing it said" in str(explained(tmp_path, text, status=1))


def test_what_sglang_can_do_without_is_not_the_cause(tmp_path: Path) -> None:
    warnings = "".join(
        f"[2026-11-30 00:00:13 TP0] {text}\n"
        for text in (
            "Failed to load image_processor for /models/kimi: /models/kimi does not appear to have a file named "
            "preprocessor_config.json.",
            "Failed to load hf_quant_config.json for model /models/kimi: Cannot access gated repo",
            "vision fallback: No CUDA GPUs are available",
            "trtllm_mha attention backend requires an SM100 GPU, triton is taken",
            "recvValue failed on SocketImpl of TCPStore",
            "DeepGEMM is off: libcudart.so.12: cannot open shared object file",
        )
    )
    text = warnings + server_logs.hit(server_logs.RUNS, "fancy.NewError: the moon is full")
    assert explained(tmp_path, text).known is None


def test_a_very_long_message_is_cut(tmp_path: Path) -> None:
    text = server_logs.hit(server_logs.RUNS, "ValueError: expected one of " + "LlamaForCausalLM, " * 500)
    assert len(str(explained(tmp_path, text))) < 600
