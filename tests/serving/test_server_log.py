"""Following a start in the server's log."""

from pathlib import Path

from aerie.serving.server_log import ServerLog

from . import server_logs


def read(tmp_path: Path, text: str) -> ServerLog:
    path = tmp_path / "server.log"
    path.write_text(text)
    log = ServerLog(path)
    log.read()
    return log


def test_start_on_gpus_is_told_stage_by_stage_each_once(tmp_path: Path) -> None:
    log = read(tmp_path, server_logs.READY)
    assert log.progress == [
        "Load weight begin. avail mem=94.03 GB",
        "Loading safetensors checkpoint shards: 25% (16/64)",
        "Loading safetensors checkpoint shards: 100% (64/64)",
        "Load weight end. elapsed=321.10 s, type=KimiK25ForConditionalGeneration, avail mem=20.11 GB, "
        "mem usage=73.92 GB.",
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 231120, KV size: 15.13 GB",
        "Memory pool end. avail mem=6.60 GB",
        "Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=6.60 GB",
        "Capturing batches: 52% (12/23, bs=96 avail_mem=3.51 GB)",
        "Capturing batches: 100% (23/23, bs=1 avail_mem=0.82 GB)",
        "Capture target decode CUDA graph end. bs=[1, 2, 4], elapsed=15.90 s, mem usage=5.78 GB, avail mem=0.82 GB.",
        "max_total_num_tokens=231120, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048, "
        "context_len=65536, available_gpu_mem=0.82 GB",
        "The server is fired up and ready to roll!",
    ]


def test_real_start_without_a_gpu_is_told(tmp_path: Path) -> None:
    log = read(tmp_path, (Path(__file__).parent / "healthy_cpu_server.log").read_text())
    assert [line.partition(".")[0].partition("=")[0] for line in log.progress] == [
        "Load weight begin",
        "Multi-thread loading shards: 100% (1/1)",
        "Load weight end",
        "KV Cache is allocated",
        "Memory pool end",
        "max_total_num_tokens",
        "The server is fired up and ready to roll!",
    ]


def test_a_bar_is_read_while_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    log = ServerLog(path)
    bar = "\rLoading safetensors checkpoint shards: {:3d}% Completed | {}/100 [00:01<00:09,  1.00it/s]"
    path.write_text("")
    told = []
    for percent in range(0, 101):
        with path.open("a") as file:
            file.write(bar.format(percent, percent))
        log.read()
        told.append(len(log.progress))
    assert told[:12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]  # a bar's text is whole when the next one begins
    assert told[-1] == 9


def test_what_the_server_settled_on_is_known(tmp_path: Path) -> None:
    log = read(tmp_path, server_logs.READY + server_logs.PREFILLS + server_logs.DECODES)
    assert log.effective == {"chunked_prefill_size": 8192, "max_running_requests": 2048}
    assert log.batch is not None
    assert (log.batch.kind, log.batch.running_requests) == ("Decode", 72)


def test_half_written_lines_wait_for_their_rest(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("Received sigquit from a chi")
    log = ServerLog(path)
    log.read()
    assert not log.over
    with path.open("a") as file:
        file.write("ld process.\n")
    log.read()
    assert log.over
