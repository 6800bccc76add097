"""What a server is to be: the plan, and SGLang's arguments and environment for it. Pure: nothing is started here.

The rules come from running SGLang 0.5.23; each is named beside the flag that it decides.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from aerie.artefacts.files import fingerprint_of, sha256_of
from aerie.serving.probing import Probing
from aerie.settings.pipeline import DraftSettings, PipelineSettings, ServingSettings
from aerie.settings.profile import Frozen, Profile, checkpoint_code_allowed, server_arguments_of

Phase = Literal["generate", "capture", "benchmark", "deploy"]
"""What a server is for. No stage has ``deploy``: it is planned, and started by ``./aerie deploy``."""

WITH_DRAFTER: tuple[Phase, ...] = ("benchmark", "deploy")
WITH_HOOKS: tuple[Phase, ...] = ("generate", "capture")
PositiveInt = Annotated[int, Field(gt=0)]

INCLUDE = Path(__file__).resolve().parents[2]
CPU_STAND_IN = INCLUDE / "sgl_kernel_cpu"
FULL_PRECISION_KV = ("auto", "bf16", "bfloat16")

OWNED_FLAGS = (
    "--reasoning-parser",
    "--tool-call-parser",
    "--speculative-algorithm",
    "--speculative-draft-model-path",
    "--speculative-num-steps",
    "--speculative-eagle-topk",
    "--speculative-num-draft-tokens",
    "--forward-hooks",
    "--disable-radix-cache",
    "--served-model-name",
    "--model-path",
    "--host",
    "--port",
    "--device",
    "--kv-cache-dtype",
    "--dtype",
    "--context-length",
    "--enable-hierarchical-cache",
    "--hicache-size",
    "--tensor-parallel-size",
    "--tp-size",
    "--data-parallel-size",
    "--dp-size",
    "--attention-data-parallel-size",
    "--attn-dp-size",
    "--pipeline-parallel-size",
    "--pp-size",
    "--expert-parallel-size",
    "--ep-size",
    "--page-size",
    "--cuda-graph-max-bs-decode",
    "--mem-fraction-static",
)
"""Flags that the plan decides, or (the parsers) that rewrite what the model produced and are never given."""


def checkpoint_identity(folder: Path) -> str:
    """Identity of a checkpoint on this machine: its configuration's content, its weight files' sizes and times.

    Weights may be half a terabyte: their bytes are not read. A copy has another identity, which costs a restart at
    worst.

    Raises:
        OSError: the folder has no ``config.json``.
    """
    files = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in folder.glob("*.safetensors")}
    return fingerprint_of({"config": sha256_of(folder / "config.json"), "files": files})


class DrafterPlan(DraftSettings):
    """The EAGLE-3 drafter to serve. ``identity`` is its ``checkpoint_identity``: a retrained one is another drafter."""

    path: Path
    identity: str


class ServerPlan(Frozen):
    """A server, wholly determined. Sizes are in tokens; ``hicache_size_gb_per_rank`` in GB (10^9 bytes) per rank.

    ``data_parallel_size`` are whole replicas, each on GPUs of its own; ``attention_data_parallel_size`` are groups for
    attention alone, inside the tensor-parallel ranks of one replica. A replica takes tensor x pipeline ranks.

    ``port`` None lets the launcher take a free one; ``probing`` is what the readiness probe asks. Neither is part of
    the server's identity.
    """

    model_path: Path
    model_identity: str
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    phase: Phase
    device: Literal["cuda", "cpu"] = "cuda"
    host: str = "127.0.0.1"
    port: PositiveInt | None = None
    tensor_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    attention_data_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    expert_parallel_size: PositiveInt = 1
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)]
    max_total_tokens: PositiveInt | None = None
    page_size: PositiveInt | None = None
    cuda_graph_max_batch_size: PositiveInt | None = None
    kv_cache_dtype: str = "auto"
    allow_quantised_kv: str | None = None
    hicache_size_gb_per_rank: PositiveInt | None = None
    chunked_prefill_size: PositiveInt | None = None
    max_running_requests: PositiveInt | None = None
    context_length: PositiveInt
    drafter: DrafterPlan | None = None
    forward_hooks: tuple[Mapping[str, Any], ...] = ()
    extra_arguments: tuple[str, ...] = ()
    probing: Probing | None = None

    @property
    def ranks(self) -> int:
        """Processes that hold a part of the model, of all replicas; on CUDA each takes a GPU of its own."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def host_states_bytes(self) -> int:
        """Host memory that the hooks of what is generated, which share it, may take; 0 without such hooks."""
        return max((int(hook["config"].get("generated_bytes", 0)) for hook in self.forward_hooks), default=0)

    @classmethod
    def of_settings(
        cls,
        settings: PipelineSettings,
        phase: Phase,
        *,
        drafter: DrafterPlan | None = None,
        forward_hooks: tuple[Mapping[str, Any], ...] = (),
    ) -> Self:
        """The plan that the pipeline's settings ask for in a phase.

        Raises:
            ValidationError: the settings cannot work in this phase.
            BadInput: they allow or ask for what the verifier's profile forbids.
            OSError: the verifier's folder has no ``config.json``.
        """
        verifier = settings.verifier
        profile = verifier.load_profile()
        return cls.of_serving(
            settings.serving,
            profile,
            model_path=verifier.path.resolve(),
            model_identity=checkpoint_identity(verifier.path),
            revision=verifier.revision,
            trust_remote_code=checkpoint_code_allowed(
                profile, allowed=verifier.trust_remote_code, revision=verifier.revision
            ),
            dtype=verifier.dtype,
            phase=phase,
            drafter=drafter,
            forward_hooks=forward_hooks,
        )

    @classmethod
    def of_serving(cls, serving: ServingSettings, profile: Profile | None, **fields: Any) -> Self:
        """The plan of these serving settings for a checkpoint that ``fields`` describe.

        Raises:
            ValidationError: they cannot work together.
            BadInput: they ask for what the checkpoint's profile forbids.
        """
        own = serving.model_dump(include=set(cls.model_fields) - {"extra_arguments"})
        extra = server_arguments_of(profile, serving.extra_arguments) if profile else serving.extra_arguments
        return cls(extra_arguments=extra, **own, **fields)

    @model_validator(mode="after")
    def _paths_mean_the_same_everywhere(self) -> Self:
        for path in (self.model_path, *([self.drafter.path] if self.drafter else [])):
            if not path.is_absolute():
                raise ValueError(f"{path}: expected an absolute path, because the server runs in another folder")
        return self

    @model_validator(mode="after")
    def _full_precision_kv(self) -> Self:
        # An fp8 cache without scales degraded the reference model noticeably, and one GPU family returned noise.
        if self.kv_cache_dtype not in FULL_PRECISION_KV and not self.allow_quantised_kv:
            raise ValueError(
                f"kv_cache_dtype {self.kv_cache_dtype!r} changes what the verifier writes: expected one of "
                f"{', '.join(FULL_PRECISION_KV)}, or a reason in allow_quantised_kv"
            )
        return self

    @model_validator(mode="after")
    def _phase_rules(self) -> Self:
        if self.drafter is not None and self.phase not in WITH_DRAFTER:
            # On a CPU SGLang verifies drafts greedily whatever the temperature: the data would not be samples.
            raise ValueError(f"phase {self.phase} has a drafter: only {' and '.join(WITH_DRAFTER)} may serve with one")
        if self.phase == "deploy" and self.drafter is None:
            raise ValueError("phase deploy has no drafter: it serves one")
        wrong = self.phase not in WITH_HOOKS if self.forward_hooks else self.phase == "capture"
        if wrong:
            raise ValueError(
                f"phase {self.phase} with {len(self.forward_hooks)} forward hooks: capture has, and generate may have"
            )
        return self

    @model_validator(mode="after")
    def _generated_rows_are_in_one_place(self) -> Self:
        # The request that asks for a sample's states must reach the process that has its other rows, all of them.
        if self.forward_hooks and self.phase == "generate":
            for name in ("data", "attention_data", "pipeline"):
                size = getattr(self, f"{name}_parallel_size")
                if size != 1:
                    raise ValueError(
                        f"{name}_parallel_size is {size} with hidden_states.capture generate: expected 1, or "
                        "capture separate"
                    )
        return self

    @model_validator(mode="after")
    def _parallel_rules(self) -> Self:
        for name, size in (
            ("attention_data_parallel_size", self.attention_data_parallel_size),
            ("expert_parallel_size", self.expert_parallel_size),
        ):
            if self.tensor_parallel_size % size:
                raise ValueError(
                    f"{name} is {size}, but the tensor-parallel ranks of a replica are shared out among its groups: "
                    f"expected a divisor of tensor_parallel_size {self.tensor_parallel_size}"
                )
        if self.pipeline_parallel_size > 1 and self.drafter is not None:
            raise ValueError(
                f"pipeline_parallel_size is {self.pipeline_parallel_size} with a drafter: "
                "SGLang has EAGLE-3 on one pipeline stage only"
            )
        return self

    @model_validator(mode="after")
    def _page_rules(self) -> Self:
        page, chunk = self.page_size or 1, self.chunked_prefill_size
        if chunk is not None and chunk % page:
            raise ValueError(f"chunked_prefill_size is {chunk}: expected a multiple of page_size {page}")
        return self

    @model_validator(mode="after")
    def _cpu_rules(self) -> Self:
        if self.device == "cuda":
            return self
        if self.hicache_size_gb_per_rank is not None:
            raise ValueError("hicache_size_gb_per_rank is set: the hierarchical cache pins host memory through CUDA")
        if self.cuda_graph_max_batch_size is not None:
            raise ValueError("cuda_graph_max_batch_size is set: a CPU has no CUDA graphs")
        for name in ("tensor", "data", "attention_data", "pipeline", "expert"):
            size = getattr(self, f"{name}_parallel_size")
            if size != 1:
                raise ValueError(f"{name}_parallel_size is {size}: on a CPU it must be 1")
        return self

    @model_validator(mode="after")
    def _extra_arguments_stay_out_of_the_plan(self) -> Self:
        for argument in self.extra_arguments:
            flag = argument.partition("=")[0]
            owned = next((name for name in OWNED_FLAGS if name.startswith(flag)), None)  # argparse takes prefixes
            if flag.startswith("--") and owned:
                raise ValueError(f"extra_arguments has {argument!r}: {owned} is decided by the plan")
        return self

    def fingerprint(self) -> str:
        """SHA-256 of what makes two servers the same one: all but where it listens and how it is probed."""
        return fingerprint_of(self.model_dump(mode="json", exclude={"host", "port", "probing"}))

    def command_line(self, python: Path, *, port: int) -> list[str]:
        """The complete command that starts the server."""
        entry = [str(CPU_STAND_IN / "launch_server.py")] if self.device == "cpu" else ["-m", "sglang.launch_server"]
        return [
            str(python),
            *entry,
            *_flags(
                {
                    "--model-path": self.model_path,
                    "--revision": self.revision,
                    "--host": self.host,
                    "--port": port,
                    "--dtype": self.dtype,
                    "--kv-cache-dtype": self.kv_cache_dtype,
                    "--mem-fraction-static": self.mem_fraction_static,
                    "--max-total-tokens": self.max_total_tokens,
                    "--page-size": self.page_size,
                    "--tensor-parallel-size": self.tensor_parallel_size,
                    **self._parallel_flags(),
                    "--cuda-graph-max-bs-decode": self.cuda_graph_max_batch_size,
                    "--context-length": self.context_length,
                    "--chunked-prefill-size": self.chunked_prefill_size,
                    "--max-running-requests": self.max_running_requests,
                    "--trust-remote-code": self.trust_remote_code,
                    "--enable-metrics": True,
                    **self._device_flags(),
                    **self._phase_flags(),
                }
            ),
            *self.extra_arguments,
        ]

    def _parallel_flags(self) -> Mapping[str, Any]:
        sizes = {
            "--data-parallel-size": self.data_parallel_size,
            "--attention-data-parallel-size": self.attention_data_parallel_size,
            "--pipeline-parallel-size": self.pipeline_parallel_size,
            "--expert-parallel-size": self.expert_parallel_size,
        }
        flags: dict[str, Any] = {flag: size for flag, size in sizes.items() if size > 1}
        # SGLang 0.5.23 refuses stages of a pipeline with its overlapped scheduler.
        return flags | ({"--disable-overlap-schedule": True} if self.pipeline_parallel_size > 1 else {})

    def _device_flags(self) -> Mapping[str, Any]:
        if self.device == "cuda":
            return {}
        return {
            "--device": "cpu",
            # SGLang replaces intel_amx by torch_native here on a CPU without AMX, but leaves the two below alone; they
            # are what knows drafts and latent caches, and our stand-in supplies their two operators on any CPU.
            "--attention-backend": "torch_native",
            "--prefill-attention-backend": "intel_amx",
            "--decode-attention-backend": "intel_amx",
            "--cuda-graph-backend-prefill": "disabled",
            "--cuda-graph-backend-decode": "disabled",
            "--disable-overlap-schedule": True,
            # An idle scheduler polls without a pause otherwise, and takes one of a small machine's cores from the rest.
            "--sleep-on-idle": True,
        }

    def _phase_flags(self) -> Mapping[str, Any]:
        flags: dict[str, Any] = dict(self._hook_flags())
        if self.hicache_size_gb_per_rank is not None and self.phase != "capture":  # it extends the radix cache
            flags |= {"--enable-hierarchical-cache": True, "--hicache-size": self.hicache_size_gb_per_rank}
        if self.drafter is not None:
            flags |= {
                "--speculative-algorithm": "EAGLE3",  # "EAGLE" loads too, and accepts nothing
                "--speculative-draft-model-path": self.drafter.path,
                "--speculative-num-steps": self.drafter.num_steps,
                "--speculative-eagle-topk": self.drafter.eagle_topk,
                "--speculative-num-draft-tokens": self.drafter.num_draft_tokens,
            }
        return flags

    def _hook_flags(self) -> Mapping[str, Any]:
        if not self.forward_hooks:
            return {}
        cache: dict[str, Any] = (
            # A prefix from the cache is not computed again, so its states would be missing.
            {"--disable-radix-cache": True}
            if self.phase == "capture"
            # Each sample has a cache of its own (``extra_key``). Who asks for a finished one's states goes before what
            # waits, while it is cached; without the second flag that would also interrupt what runs.
            else {"--enable-priority-scheduling": True, "--disable-priority-preemption": True}
        )
        return {
            "--forward-hooks": json.dumps(list(self.forward_hooks)),
            **cache,
            # A replayed graph runs no Python.
            "--cuda-graph-backend-prefill": "disabled",
            **({"--cuda-graph-backend-decode": "disabled"} if self.phase == "generate" else {}),
            # The fused form replaces the norm that the hooks are on.
            "--enforce-disable-flashinfer-allreduce-fusion": self.tensor_parallel_size > 1,
        }

    def environment(self) -> dict[str, str]:
        """Variables to add to the server's environment: module paths, no downloads, and what a CPU needs."""
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if self.device == "cuda":
            return {"PYTHONPATH": str(INCLUDE), **offline}
        return {
            "PYTHONPATH": os.pathsep.join((str(CPU_STAND_IN), str(INCLUDE))),
            "SGLANG_USE_CPU_ENGINE": "1",
            # Compiling a few small functions wants a C++ compiler, writes outside the clone and takes half a minute.
            "TORCH_COMPILE_DISABLE": "1",
            "OMP_NUM_THREADS": "1",  # one team of threads per process on two cores is fifteen times slower
            **offline,
        }


def _flags(values: Mapping[str, Any]) -> list[str]:
    """Command-line arguments: None and False are left out, True is the bare flag."""
    arguments: list[str] = []
    for flag, value in values.items():
        if value is True:
            arguments.append(flag)
        elif value is not None and value is not False:
            arguments += [flag, str(value)]
    return arguments
