"""The real keeper, with SGLang replaced by the fake server, and with little patience."""

import json
from pathlib import Path
from typing import Any

from aerie.serving import host_memory, keeper, launch
from aerie.serving.plan import ServerPlan


def fake_info(plan: ServerPlan) -> dict[str, Any]:
    """What ``/server_info`` says of a server that is as planned, but for its launch token."""
    return {
        "model_path": str(plan.model_path),
        "dtype": plan.dtype,
        "kv_cache_dtype": plan.kv_cache_dtype,
        "context_length": plan.context_length,
        "tp_size": plan.tensor_parallel_size,
        "reasoning_parser": None,
        "tool_call_parser": None,
        "speculative_algorithm": "EAGLE3" if plan.drafter else None,
        "disable_radix_cache": plan.phase == "capture",
        "max_total_num_tokens": 4096,
    }


def fake_command_line(plan: ServerPlan, python: Path, *, port: int) -> list[str]:
    """The command of a fake server that turns out as planned; its behaviour is the plan's one extra argument."""
    (behaviour,) = plan.extra_arguments
    script = Path(__file__).with_name("fake_server.py")
    sizes = plan.model_dump(include={"mem_fraction_static", "chunked_prefill_size", "max_running_requests"})
    return [
        str(python), str(script), "--port", str(port), "--info", json.dumps(fake_info(plan)),
        "--sizes", json.dumps(sizes), "--behaviour", behaviour,
    ]  # fmt: skip


if __name__ == "__main__":
    ServerPlan.command_line = fake_command_line
    keeper.GRACE_SECONDS = 3.5
    keeper.WATCH_SECONDS = launch.POLL_SECONDS = host_memory.SETTLE_POLL_SECONDS = 0.1
    keeper.main()
