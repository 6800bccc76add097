"""``./aerie plan``: what people and programs get, its exit codes, and errors in one line."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie import cli
from aerie.artefacts.layout import EditionFiles
from aerie.artefacts.prompts import Prompt, write_prompts
from aerie.serving.errors import PlanRefused
from aerie.serving.host import Gpu, HostFacts
from aerie.settings.bundled import bundled_config
from aerie.settings.machine import data_root
from aerie.settings.presets import preset_path
from aerie.stages import Events, StageRequest

KEYS = {
    "max_total_num_tokens", "bytes_per_token", "weights_gib", "kv_pool_gib", "headroom_gib", "concurrent_requests",
    "hicache_gb_per_rank", "hicache_gb_total", "host_available_gb", "timeline", "verdict", "reasons", "command",
}  # fmt: skip
PHASES = ["generate", "capture", "benchmark", "deploy"]
KIMI = ("--profile", "kimi_k25", "--gpus", "8", "--gpu-memory-gib", "94.04")
OBSERVED = ("--profile", "kimi_k25", "--gpus", "8", "--observed", "0.85=116171", "--observed", "0.90:fp8_e4m3=376029")

Plan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Plan:
    """Runs the command as a person would, on a machine without GPUs; returns exit code, output and errors."""
    monkeypatch.setenv("AERIE_HOME", str(tmp_path))
    monkeypatch.setenv("AERIE_SERVE_PYTHON", sys.executable)
    monkeypatch.delenv("AERIE_CONFIG", raising=False)
    monkeypatch.delenv("AERIE_MODELS", raising=False)
    monkeypatch.delenv("AERIE_DATA_ROOT", raising=False)
    have_gpus(monkeypatch)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["aerie", "plan", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def have_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu) -> None:
    facts = HostFacts(hostname="gpu-1", memory_total_bytes=449 * 10**9, memory_available_bytes=445 * 10**9, gpus=gpus)
    monkeypatch.setattr("aerie.serving.host.host_facts_of", lambda python: facts)
    monkeypatch.setattr("aerie.servers.host_facts_of", lambda python: facts)


def document(plan: Plan, *arguments: str, code: int = 0) -> dict[str, Any]:
    found, out, err = plan(*arguments, "--json")
    assert (found, err) == (code, "")
    loaded: dict[str, Any] = json.loads(out)
    assert set(loaded) >= KEYS
    return loaded


def test_the_reference_deployment_from_two_observations(plan: Plan) -> None:
    rows = {"0.85": 116_171, "0.88": 159_277, "0.93": 231_120}
    for fraction, tokens in rows.items():
        found = document(plan, *OBSERVED, "--mem-fraction", fraction, "--phase", "generate")
        assert found["max_total_num_tokens"] == pytest.approx(tokens, rel=1e-3)
        assert found["verdict"] == ("tight" if fraction == "0.93" else "fits")
        assert f"--mem-fraction-static {fraction} --tensor-parallel-size 8" in found["command"]
    assert found["bytes_per_token"] == 70_272
    quantised = document(plan, *OBSERVED, "--mem-fraction", "0.9", "--kv-dtype", "fp8_e4m3", code=1)
    assert quantised["max_total_num_tokens"] == pytest.approx(376_029, rel=1e-3)
    assert "kv_cache_dtype fp8_e4m3 changes what the verifier writes" in quantised["reasons"][0]
    allowed = ("--allow-quantised-kv", "to compare with the record", "--phase", "generate")
    row = document(plan, *OBSERVED, "--mem-fraction", "0.9", "--kv-dtype", "fp8_e4m3", *allowed)
    assert row["max_total_num_tokens"] == pytest.approx(376_029, rel=1e-3)
    assert "KV type fp8_e4m3 is allowed for a reason: to compare with the record" in row["notes"]


def test_a_refused_plan_is_told_whole_and_has_no_command(plan: Plan) -> None:
    found = document(plan, *OBSERVED, "--hicache-size", "300", "--host-ram-gb", "449", code=1)
    assert found["verdict"] == "refused"
    assert (found["hicache_gb_per_rank"], found["hicache_gb_total"]) == (300, 2400)
    assert (found["host_available_gb"], found["hicache_safe_gb_per_rank"]) == (449, 48)
    assert found["command"] is None
    assert found["phases"]["capture"]["command"]  # has no hierarchical cache
    code, out, _ = plan(*OBSERVED, "--hicache-size", "300", "--host-ram-gb", "449")
    assert code == 1
    assert "generate: no command, the plan is refused: hicache_size_gb_per_rank 300: 8 ranks x 300 GB" in out
    assert out.rstrip().splitlines()[-1].endswith("floor(0.95 x (449 - 40) / 8) = 48")


def test_the_preset_explains_itself_without_gpus(plan: Plan) -> None:
    found = document(plan, "--preset", "kimi-k25-8x96g")
    assert found["verdict"] == "fits"
    assert found["max_total_num_tokens"] == pytest.approx(159_277, rel=1e-3)
    assert (found["hicache_gb_total"], found["host_available_gb"]) == (384, 445)
    timeline = found["timeline"]
    assert timeline["uncapped_hours"] == pytest.approx(57.1, abs=0.1)
    assert timeline["capped_sum"] == "80,000,000 tokens / 930-1,350 tokens/s = 16.5-23.9 h"
    assert timeline["ends"] is None
    code, out, _ = plan("--preset", "kimi-k25-8x96g")
    assert code == 0
    for shown in ("B8_sweagent", "57.1", "16.5-23.9", "adds no decode slots", "Verdict: fits", "1.445 as measured"):
        assert shown in out.replace("\n", " ")


def test_a_rate_given_is_taken_in_place_of_the_configurations(plan: Plan) -> None:
    found = document(plan, "--preset", "kimi-k25-8x96g", "--rate", "1000")
    assert found["timeline"]["capped_hours"] == [pytest.approx(22.222, abs=0.01)] * 2


def test_the_generation_that_captures_is_planned_with_its_hooks_and_what_they_may_hold(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = yaml.safe_load(preset_path("kimi-k25-8x96g").read_text())
    settings["hidden_states"] = {"capture": "generate", "capture_memory_gib": 2}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.setenv("AERIE_CONFIG", str(tmp_path / "config.yaml"))
    code, out, _ = plan("--json")
    assert (code, "(445 - 40 - 2.147) / 8) = 47" in out) == (1, True), "the cache of the preset leaves it no room"
    found = document(plan, "--hicache-size", "47")
    assert (found["host_states_gb"], found["phases"]["benchmark"]["host_states_gb"]) == (pytest.approx(2.1475), 0)
    command = shlex.split(found["phases"]["generate"]["command"])
    hooks = json.loads(command[command.index("--forward-hooks") + 1])
    assert {hook["config"]["generated_bytes"] for hook in hooks} == {2 * 2**30}
    assert "--disable-radix-cache" not in command


def test_each_phase_has_the_flags_that_it_needs_and_not_those_of_another(plan: Plan) -> None:
    found = document(plan, "--preset", "kimi-k25-8x96g")
    commands = {phase: shlex.split(found["phases"][phase]["command"]) for phase in PHASES}
    assert found["command"] == found["phases"]["generate"]["command"]
    for phase, command in commands.items():
        drafted, captured = phase in ("benchmark", "deploy"), phase == "capture"
        assert ("EAGLE3" in command) == drafted
        assert ("--forward-hooks" in command) == ("--disable-radix-cache" in command) == captured
        assert ("--cuda-graph-backend-prefill" in command) == captured
        assert ("--hicache-size" in command) != captured
        assert (found["phases"][phase]["drafter_gib"] > 0) == drafted
        assert not {"--reasoning-parser", "--tool-call-parser"} & set(command)
    hooks = json.loads(commands["capture"][commands["capture"].index("--forward-hooks") + 1])
    layers = [hook["target_modules"][0] for hook in hooks]
    assert layers[1:] == [
        *(f"language_model.model.layers.{layer}.input_layernorm" for layer in (2, 30, 58)), "language_model.model.norm"
    ]  # fmt: skip


def test_one_phase_is_planned_alone_when_it_is_named(plan: Plan) -> None:
    found = document(plan, *KIMI, "--phase", "deploy")
    assert list(found["phases"]) == ["deploy"]
    assert found["phase"] == "deploy"


def test_compose_services_are_valid_one_for_each_phase(plan: Plan, tmp_path: Path) -> None:
    code, out, err = plan("--preset", "kimi-k25-8x96g", "--format", "compose")
    assert (code, err) == (0, "")
    file = tmp_path / "compose.yaml"
    file.write_text(out)
    tool = Path(sys.executable).parent / "check-jsonschema"
    done = subprocess.run(
        [tool, "--builtin-schema", "vendor.compose-spec", file],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    services = yaml.safe_load(out)["services"]
    assert [service["profiles"] for service in services.values()] == [[phase] for phase in PHASES]
    generate = services["sglang-generate"]
    assert generate["entrypoint"] == ["python3", "-m", "sglang.launch_server"]
    assert generate["command"][generate["command"].index("--hicache-size") + 1] == "48"
    assert generate["deploy"]["resources"]["limits"]["memory"] == "445000000000b"
    assert {volume["target"] for volume in services["sglang-deploy"]["volumes"]} > {generate["volumes"][0]["target"]}


def test_a_refused_phase_has_no_service_and_says_so(plan: Plan) -> None:
    code, out, err = plan(*OBSERVED, "--hicache-size", "300", "--host-ram-gb", "449", "--format", "compose")
    assert code == 1
    assert list(yaml.safe_load(out)["services"]) == ["sglang-capture"]
    assert err.splitlines()[0].startswith("aerie: no service for generate: hicache_size_gb_per_rank 300")


def test_nothing_is_printed_where_no_phase_has_a_service(plan: Plan) -> None:
    hicache = ("--hicache-size", "300", "--host-ram-gb", "449")
    code, out, err = plan(*OBSERVED, *hicache, "--phase", "generate", "--format", "compose")
    assert (code, out) == (1, "")
    assert err.startswith("aerie: no service for generate: ")


def test_gpus_of_the_machine_are_taken_where_none_are_given(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(index=0, name="RTX PRO 6000", total_bytes=97_887 * 2**20, used_bytes=0, processes=())
    have_gpus(monkeypatch, *[gpu] * 8)
    found = document(plan, "--profile", "kimi_k25", "--hicache-size", "48")
    assert found["gpu_memory_gib"] == pytest.approx(94.04, abs=0.01)
    assert "--tensor-parallel-size 8" in found["command"]
    assert (found["host_available_gb"], found["verdict"]) == (445, "fits")
    assert "NVML on gpu-1: 8 x RTX PRO 6000" in plan("--profile", "kimi_k25")[1]


def test_the_configuration_in_use_is_planned_where_nothing_is_named(plan: Plan) -> None:
    found = document(plan)
    assert (found["model"], found["gpus"], found["max_total_num_tokens"]) == ("demo", 0, 65_536)
    assert "launch_server.py" in found["command"]
    assert plan("--format", "compose") == (2, "", "aerie: device is cpu: a compose service is for GPUs; "
        "copy the command line instead\n")  # fmt: skip


def test_a_checkpoint_is_planned_from_its_own_files(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(bundled_config("qwen3_8b")))
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 20000000000}}')
    lengths = ("--prompt-tokens", "1000", "--response-tokens", "2000")
    one = ("--gpus", "1", "--gpu-memory-gib", "79")
    for named in (tmp_path, tmp_path / "config.json"):
        found = document(plan, "--model", str(named), *one, *lengths, "--phase", "generate")
        assert found["weights_gib"] == pytest.approx(20e9 / 2**30, rel=1e-4)
        assert found["concurrent_requests"] == found["max_total_num_tokens"] // 3000
        assert found["estimated"] == []
    given = document(plan, "--model", str(tmp_path), *one, "--weights-gib", "10", "--phase", "generate")
    assert given["weights_gib"] == 10


def test_what_a_preset_observed_is_left_out_on_other_gpus_or_another_division(plan: Plan) -> None:
    preset = ("--preset", "kimi-k25-8x96g", "--phase", "generate")
    larger = document(plan, *preset, "--gpu-memory-gib", "140")
    assert larger["gpu_memory_gib"] == 140
    assert "gpu_memory_gib given anew" in str(larger["notes"])
    sixteen = document(plan, *preset, "--tp", "16", "--gpus", "16", "--gpu-memory-gib", "94.04", code=1)
    assert sixteen["weights_gib"] < 40
    assert "16 ranks x 48 GB = 768 GB" in sixteen["reasons"][0]
    code, _, err = plan(*preset, "--tp", "16")
    assert code == 2
    assert "--gpu-memory-gib" in err


def test_observations_that_are_given_are_believed_before_nominal_figures(plan: Plan) -> None:
    nominal = ("--gpu-memory-gib", "96", "--weights-gib", "595")
    found = document(plan, *OBSERVED, *nominal, "--mem-fraction", "0.88", "--phase", "generate")
    assert found["max_total_num_tokens"] == pytest.approx(159_277, rel=1e-3)
    assert "the observations are believed before gpu_memory_gib and weights_gib" in str(found["notes"])


def test_a_checkpoint_without_a_named_profile_has_its_familys_hooks_where_only_one_is_meant(
    plan: Plan, tmp_path: Path
) -> None:
    for name, module in (("kimi_k25", "language_model.model.norm"), ("qwen3_8b", "model.norm")):
        (tmp_path / "config.json").write_text(json.dumps(bundled_config(name)))
        found = document(plan, "--model", str(tmp_path), *KIMI[2:], "--phase", "capture")
        assert f'"target_modules": ["{module}"]' in found["command"]
        assert ("--trust-remote-code" in str(found["notes"])) == (name == "kimi_k25")


def test_prompts_tell_what_a_prefix_cache_can_save(plan: Plan, tmp_path: Path) -> None:
    rows = [Prompt(f"s{n}", f"c{n}", 0, "train", [*range(90), *[1000 + n] * 10], None, n, None) for n in range(10)]
    write_prompts(tmp_path / "prompts.parquet", rows)
    hicache = ("--hicache-size", "48", "--host-ram-gb", "445")
    found = document(plan, *KIMI, *hicache, "--prompts", str(tmp_path / "prompts.parquet"))
    assert "of 1,000 prompt tokens in 10 prompts 810 (81.0%) begin as another prompt does" in str(found["notes"])
    assert "adds no decode slots" in str(found["notes"])
    assert "--prompts FILE" in str(document(plan, *KIMI, *hicache)["notes"])
    edition = EditionFiles(data_root(), "main").dataset("B1_glaive")
    edition.folder.mkdir(parents=True)
    (tmp_path / "prompts.parquet").rename(edition.prompts)
    assert "810 (81.0%)" in str(document(plan, "--preset", "kimi-k25-8x96g")["notes"])


def test_a_data_set_that_is_generated_takes_no_more_time(plan: Plan) -> None:
    edition = EditionFiles(data_root(), "main").dataset("B1_glaive")
    edition.folder.mkdir(parents=True)
    edition.manifest("generate").write_text("{}")
    timeline = document(plan, "--preset", "kimi-k25-8x96g")["timeline"]
    assert timeline["datasets"][0]["capped_sum"] == "finished"
    assert timeline["capped_sum"].startswith("70,000,000 tokens")


def test_the_suggestion_fits_when_it_is_taken(plan: Plan) -> None:
    machine = ("--host-ram-gb", "449", "--prompt-tokens", "207", "--response-tokens", "3793")
    best = document(plan, *OBSERVED, *machine, "--suggest")["suggestion"]
    assert best["hicache_size_gb_per_rank"] == 48
    taken = ("--mem-fraction", str(best["mem_fraction_static"]), "--hicache-size", "48")
    assert document(plan, *OBSERVED, *machine, *taken)["verdict"] == "fits"
    assert best["concurrency"] == 2 * document(plan, *OBSERVED, *machine, *taken)["concurrent_requests"]
    refused = document(plan, *OBSERVED, *machine, "--suggest", "--kv-dtype", "fp8_e4m3", code=1)
    assert refused["suggestion"] == best  # never a quantised cache
    assert "Suggested: --mem-fraction" in plan(*OBSERVED, *machine, "--suggest")[1]


def test_a_drafter_that_is_there_is_measured_and_not_estimated(plan: Plan, tmp_path: Path) -> None:
    config = {
        **bundled_config("llama_31_8b"), "num_hidden_layers": 1, "draft_vocab_size": 32_000, "hidden_size": 7168,
        "num_attention_heads": 64, "num_key_value_heads": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = document(plan, *OBSERVED, "--drafter", str(tmp_path), "--phase", "deploy")
    assert found["estimated"] == []
    assert f"--speculative-draft-model-path {tmp_path}" in found["command"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "x"), "--gpus is 'x'"),
        (("--gpus", "0"), "--gpus is '0'"),
        (("--gpus", "-8"), "--gpus is '-8'"),
        (("--gpus", "8.5"), "--gpus is '8.5'"),
        (("--gpu-memory-gib", "nan"), "--gpu-memory-gib is 'nan'"),
        (("--gpu-memory-gib", "inf"), "--gpu-memory-gib is 'inf'"),
        (("--gpu-memory-gib", "-94"), "--gpu-memory-gib is '-94'"),
        (("--weights-gib", "heavy"), "--weights-gib is 'heavy'"),
        (("--weights-gib", "1e300"), "--weights-gib is '1e300'"),
        (("--max-running-requests", "9" * 5000), "--max-running-requests is '999"),
        (("--mem-fraction", "1"), "--mem-fraction is '1': expected a fraction between 0 and 1"),
        (("--mem-fraction", "88"), "--mem-fraction is '88'"),
        (("--mem-fraction", "0"), "--mem-fraction is '0'"),
        (("--host-ram-gb", "0"), "--host-ram-gb is '0'"),
        (("--host-ram-gb", "40", "--host-loading-gb", "50"), "host_loading_gb 50 of host_ram_gb 40"),
        (("--hicache-size", "1.5"), "--hicache-size is '1.5'"),
        (("--hicache-size", "48"), "--host-ram-gb"),
        (("--rate", "fast"), "--rate is 'fast'"),
        (("--rate", "1350-930"), "the lower first"),
        (("--rate", "0"), "--rate is '0'"),
        (("--rate", "-5"), "found '-5'"),
        (("--observed", "0.85"), "--observed 0.85 is ''"),
        (("--observed", "1.2=100"), "--observed is '1.2'"),
        (("--observed", "0.85=-5"), "--observed 0.85 is '-5'"),
        (("--observed", "0.85:int3=5"), "KV type 'int3' is not known"),
        (("--observed", "0.85=116171", "--observed", "0.85=159277"), "--observed 0.85 is both 116,171 and 159,277"),
        (("--observed", "0.85=116171", "--gpu-memory-gib", "40"), "the observations make the weights 26.40 GiB"),
        (("--observed", "0.85=116171", "--observed", "0.9=376029"), "the observations are of GPUs with 340.13 GiB"),
        (
            ("--observed", "0.85=116171", "--observed", "0.88=159277", "--observed", "0.93=400000"),
            "observed 0.85: 116,171 tokens, where all observations together make it 90,322",
        ),
        (("--kv-dtype", "fp8_e4m3", "--allow-quantised-kv", " "), "allow_quantised_kv is blank"),
        (("--kv-dtype", "int3"), "kv_cache_dtype 'int3' is not known"),
        (("--prompt-tokens", "many"), "--prompt-tokens is 'many'"),
        (("--tp", "3"), "num_attention_heads 64 cannot be shared by 3 ranks"),
        (("--dp", "3"), "--gpus 8 cannot be divided"),
        (("--ep", "5"), "expert_parallel_size is 5"),
        (("--page-size", "64", "--chunked-prefill-size", "100"), "chunked_prefill_size is 100"),
        (("--preset", "demo"), "--preset names model and profile"),
        (("--model", "/nowhere"), "/nowhere: cannot be read"),
        (("--prompts", "/nowhere"), "/nowhere"),
        (("--json", "--format", "compose"), "two documents"),
    ],
)
def test_bad_input_is_one_line_that_names_it(plan: Plan, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = plan(*KIMI, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("aerie: ")
    assert message in err


@pytest.mark.parametrize("value", [None, "61", -61, 0, 1.5, 10**11, 10**400])
def test_a_field_of_the_configuration_that_makes_no_sense_is_one_line(plan: Plan, tmp_path: Path, value: Any) -> None:
    config = {**bundled_config("llama_31_8b"), "num_hidden_layers": value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = plan("--model", str(tmp_path), "--gpus", "1", "--gpu-memory-gib", "80")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{tmp_path}/config.json: num_hidden_layers is" in err


@pytest.mark.parametrize(
    ("name", "value"),
    [("torch_dtype", ["bfloat16"]), ("tie_word_embeddings", "no"), ("text_config", "llama"), ("text_config", [1])],
)
def test_a_field_of_the_wrong_kind_is_named(plan: Plan, tmp_path: Path, name: str, value: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**bundled_config("llama_31_8b"), name: value}))
    code, out, err = plan("--model", str(tmp_path), "--gpus", "1", "--gpu-memory-gib", "80")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{tmp_path}/config.json: " in err
    assert f"{name}" in err


def test_a_configuration_nested_without_end_is_no_json(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    code, out, err = plan("--model", str(tmp_path), "--gpus", "1", "--gpu-memory-gib", "80")
    assert (code, out) == (2, "")
    assert "config.json: not JSON" in err


def test_a_type_that_the_configuration_leaves_out_is_told(plan: Plan) -> None:
    notes = document(plan, "--profile", "gpt_oss_120b", "--gpus", "8", "--gpu-memory-gib", "80")["notes"]
    assert any("has no dtype: bfloat16 is taken" in note for note in notes)


def test_gpus_are_not_given_to_a_server_on_a_cpu(plan: Plan) -> None:
    code, out, err = plan("--preset", "demo", "--gpus", "8", "--gpu-memory-gib", "80")
    assert (code, out) == (2, "")
    assert "device is cpu" in err


def test_what_a_preset_observed_is_refused_on_a_machine_with_other_gpus(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = (Gpu(index=index, name="GPU", total_bytes=80 * 2**30, used_bytes=0, processes=()) for index in range(8))
    have_gpus(monkeypatch, *gpus)
    code, _, err = plan("--preset", "kimi-k25-8x96g")
    assert code == 2
    assert "the observations are of GPUs with 94.04 GiB, and these have 78.45 GiB" in err


def test_a_quantisation_that_cannot_be_estimated_can_be_observed(plan: Plan, tmp_path: Path) -> None:
    document_ = {**bundled_config("llama_31_8b"), "quantization_config": {"quant_method": "modelopt"}}
    (tmp_path / "config.json").write_text(json.dumps(document_))
    observed = ("--observed", "0.85=400000", "--observed", "0.90=430000")
    assert document(plan, "--model", str(tmp_path), "--gpus", "1", *observed, "--phase", "generate")


def test_without_gpus_it_is_said_what_to_give(plan: Plan) -> None:
    code, out, err = plan("--profile", "kimi_k25")
    assert (code, out) == (2, "")
    assert "host gpu-1 has no GPU that NVML sees: give --gpus and --gpu-memory-gib" in err


def stage(request: StageRequest, tmp_path: Path) -> tuple[Any, str]:
    from aerie.servers import plan as plan_stage

    events = tmp_path / "events.jsonl"
    result = plan_stage(request, Events(events))
    return result, "\n".join(json.loads(line)["message"] for line in events.read_text().splitlines())


def test_the_first_task_shows_the_same_plan(make_request: Any, tmp_path: Path) -> None:
    result, log = stage(make_request(), tmp_path)
    assert set(result.data) >= KEYS
    assert result.data["verdict"] == "fits"
    for shown in ("KV pool", "Timeline", "Verdict: fits", "launch_server.py"):
        assert shown in log


def test_nothing_starts_on_a_refused_plan(
    settings: Any, make_request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AERIE_SERVE_PYTHON", sys.executable)
    have_gpus(monkeypatch, Gpu(index=0, name="GPU", total_bytes=80 * 2**30, used_bytes=0, processes=()))
    serving = settings.serving.model_copy(update={"device": "cuda", "hicache_size_gb_per_rank": 500})
    request = make_request(settings.model_copy(update={"serving": serving}), phase="generate")
    from aerie import servers

    monkeypatch.setattr(servers, "ensure_configured", lambda *_, **__: pytest.fail("a server was started"))
    for refused in (lambda: stage(request, tmp_path), lambda: servers.start(request, Events(tmp_path / "e"))):
        with pytest.raises(PlanRefused, match=r"hicache_size_gb_per_rank 500: 1 ranks x 500 GB"):
            refused()


def test_where_gpus_cannot_be_seen_the_keeper_is_left_to_check_and_that_is_said(
    settings: Any, make_request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AERIE_SERVE_PYTHON", sys.executable)
    have_gpus(monkeypatch)
    serving = settings.serving.model_copy(update={"device": "cuda"})
    result, log = stage(make_request(settings.model_copy(update={"serving": serving})), tmp_path)
    assert result.data == {"verdict": None}
    assert "the keeper checks the plan where it starts the server" in log


def test_someone_elses_server_is_planned_by_its_owner(settings: Any, make_request: Any, tmp_path: Path) -> None:
    serving = settings.serving.model_copy(update={"backend": "external", "external_url": "http://10.0.0.5:8000"})
    result, log = stage(make_request(settings.model_copy(update={"serving": serving})), tmp_path)
    assert result.data == {"verdict": None}
    assert "http://10.0.0.5:8000 is someone else's server" in log
