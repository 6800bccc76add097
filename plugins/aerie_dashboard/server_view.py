"""What pages show of servers: leases, launches, and the memory plan, from rows of the store."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import get_args

from aerie.serving.plan import Phase
from aerie.store.queries.rows import Row
from aerie_dashboard.charts import Chart
from aerie_dashboard.documents import Stored, Unreadable, read_document
from aerie_dashboard.formatting import utc


class HolderRow(Stored):
    """Who holds a server, and until when (seconds since 1970)."""

    owner: str
    expires_at: float


class PlannedServer(Stored):
    """What a lease says of its server's plan."""

    phase: str
    model_path: str
    device: str
    tensor_parallel_size: int
    mem_fraction_static: float
    context_length: int
    hicache_size_gb_per_rank: int | None


class Launched(Stored):
    """Planned and reported tokens of a launch, and the memory of one rank (bytes)."""

    launch_token: str
    model_identity: str
    hostname: str
    gpu_name: str | None
    sglang_version: str
    observed_at: float
    mem_fraction_static: float
    bytes_per_token: int
    memory_before_launch_bytes: int
    predicted_max_total_num_tokens: int
    max_total_num_tokens: int
    memory_left_bytes: int | None

    @property
    def deviation(self) -> float:
        """By what share the server's pool is larger than predicted."""
        return self.max_total_num_tokens / self.predicted_max_total_num_tokens - 1

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV pool of one rank."""
        return self.max_total_num_tokens * self.bytes_per_token

    @property
    def predicted_pool_bytes(self) -> int:
        """Bytes of the KV pool of one rank, as the plan had it."""
        return self.predicted_max_total_num_tokens * self.bytes_per_token

    @property
    def beside_bytes(self) -> int | None:
        """Bytes of weights, graphs and buffers of one rank, None where the server does not say what was left."""
        if self.memory_left_bytes is None:
            return None
        return max(0, self.memory_before_launch_bytes - self.pool_bytes - self.memory_left_bytes)


class LeaseDocument(Stored):
    """A lease. Those that an earlier version wrote name one ``owner`` and have no ``holders``."""

    host: str
    state: str
    url: str
    launch_token: str
    plan: PlannedServer
    error: str | None
    holders: tuple[HolderRow, ...] | None = None
    owner: str | None = None
    max_total_num_tokens: int | None
    observation: Launched | None = None
    gpu_utilisation: float | None = None
    reduction: str | None = None
    started_at: float
    expires_at: float

    @property
    def owners(self) -> tuple[str, ...]:
        """Who holds it."""
        return tuple(one.owner for one in self.holders) if self.holders is not None else (self.owner or "",)

    @property
    def started(self) -> datetime:
        """When the server was started."""
        return datetime.fromtimestamp(self.started_at, UTC)


@dataclass(frozen=True)
class LeaseLine:
    """A lease in a table: what the keeper last told, and what became of it."""

    launch_token: str
    lease: LeaseDocument | Unreadable
    recorded_at: datetime
    updated_at: datetime
    ended_at: datetime | None
    end_reason: str | None

    @property
    def state(self) -> str:
        """What the server is now, as far as the store knows."""
        if self.ended_at:
            return "ended"
        if isinstance(self.lease, Unreadable):
            return "not known"
        return "expired" if self.lease.expires_at < datetime.now(UTC).timestamp() else self.lease.state


def lease_lines(rows: Iterable[Row]) -> list[LeaseLine]:
    """Leases, as the store has them."""
    return [
        LeaseLine(
            row["launch_token"],
            read_document(LeaseDocument, row["document"], place=f"leases, launch_token {row['launch_token']}"),
            row["recorded_at"],
            row["updated_at"],
            row["ended_at"],
            row["end_reason"],
        )
        for row in rows
    ]


def launches_of_run(rows: Iterable[Row]) -> list[LeaseLine]:
    """Servers that a run held, from the rows of its leases, the first one first."""
    readable = (one for one in lease_lines(rows) if isinstance(one.lease, LeaseDocument))
    return sorted(readable, key=lambda one: one.recorded_at)


PHASES: tuple[str, ...] = get_args(Phase)


class PhaseMemory(Stored):
    """The memory plan of one phase: GiB of each GPU (of the host where it serves itself), GB of the host."""

    phase: Phase
    verdict: str
    reasons: tuple[str, ...]
    max_total_num_tokens: int
    gpu_memory_gib: float
    weights_gib: float
    drafter_gib: float
    kv_pool_gib: float
    graphs_gib: float
    headroom_gib: float
    concurrent_requests: int | None
    hicache_gb_total: float | None
    host_available_gb: float | None
    host_loading_gb: float | None
    host_states_gb: float = 0.0  # plans of before do not count it


class PlanDocument(Stored):
    """A whole plan; ``gpus`` is 0 where the host serves itself. Those of earlier versions do not say it."""

    verdict: str
    reasons: tuple[str, ...]
    model: str
    gpus: int | None = None
    phases: Mapping[str, PhaseMemory]

    @property
    def device(self) -> str:
        """What the server's memory is of."""
        return "the host" if self.gpus == 0 else "each GPU"

    @property
    def in_order(self) -> list[PhaseMemory]:
        """The phases in the order in which a run takes them, which the store's ``jsonb`` does not keep."""
        return sorted(self.phases.values(), key=lambda one: PHASES.index(one.phase))


GPU_PARTS = (
    ("weights", "weights_gib", "blue"),
    ("drafter", "drafter_gib", "violet"),
    ("KV pool", "kv_pool_gib", "teal"),
    ("graphs", "graphs_gib", "amber"),
    ("head-room", "headroom_gib", "grey"),
)


@dataclass(frozen=True)
class Plan:
    """The plan of a run; ``device`` and ``host`` are its bars, ``host`` None where that memory is not planned."""

    run_id: str
    at: datetime
    document: PlanDocument
    device: Chart
    host: Chart | None


def plan_of(row: Row | None, run_id: str) -> Plan | Unreadable | None:
    """The plan of a run, None where it has none: it was external, or its GPUs could not be seen."""
    if row is None:
        return None
    document = read_document(PlanDocument, row["document"], place=f"plans, run_id {run_id}")
    if isinstance(document, Unreadable):
        return document
    return Plan(run_id, row["recorded_at"], document, _device_chart(document), _host_chart(document))


def _device_chart(plan: PlanDocument) -> Chart:
    phases = plan.in_order
    sizes = {one.gpu_memory_gib for one in phases}
    size = f", of {sizes.pop():,.1f} GiB" if len(sizes) == 1 else ""
    return Chart.model_validate(
        {
            "kind": "stacked",
            "horizontal": True,
            "title": f"Memory of {plan.device} by phase{size}",
            "labels": [one.phase for one in phases],
            "series": [
                {"name": name, "values": [getattr(one, field) for one in phases], "colour": colour}
                for name, field, colour in GPU_PARTS
                if any(getattr(one, field) for one in phases)
            ],
            "x_title": "phase",
            "y_title": "GiB",
        }
    )


def _host_chart(plan: PlanDocument) -> Chart | None:
    phases = [one for one in plan.in_order if one.host_available_gb is not None]
    if not phases:
        return None
    loading = [one.host_loading_gb for one in phases]
    caches = [one.hicache_gb_total for one in phases]
    states = [one.host_states_gb for one in phases]
    free = [
        max(
            0.0,
            (one.host_available_gb or 0)
            - (one.host_loading_gb or 0)
            - (one.hicache_gb_total or 0)
            - one.host_states_gb,
        )
        for one in phases
    ]
    series = (
        ("loading", loading, "blue"),
        ("hierarchical cache", caches, "violet"),
        ("states of unfinished samples", states, "teal"),
        ("free", free, "grey"),
    )
    return Chart.model_validate(
        {
            "kind": "stacked",
            "horizontal": True,
            "title": "Memory of the host by phase",
            "labels": [one.phase for one in phases],
            "series": [
                {"name": name, "values": values, "colour": colour} for name, values, colour in series if any(values)
            ],
            "x_title": "phase",
            "y_title": "GB",
        }
    )


def launches_chart(launches: Sequence[Launched]) -> Chart:
    """Predicted beside reported tokens of the KV pool, launch by launch."""
    return Chart.model_validate(
        {
            "kind": "bar",
            "title": "Tokens of the KV pool: predicted and reported",
            "labels": [utc(datetime.fromtimestamp(one.observed_at, UTC)) for one in launches],
            "series": [
                {
                    "name": "predicted",
                    "values": [one.predicted_max_total_num_tokens for one in launches],
                    "colour": "grey",
                },
                {"name": "reported", "values": [one.max_total_num_tokens for one in launches], "colour": "teal"},
            ],
            "x_title": "launch",
            "y_title": "tokens",
        }
    )


def launched_memory(launches: Sequence[Launched]) -> Chart:
    """What a rank's memory went to, launch by launch, as far as servers say what was left."""
    known = [one for one in launches if one.beside_bytes is not None]
    gigabytes = 1e9
    series = (
        ("weights, graphs, buffers", [(one.beside_bytes or 0) / gigabytes for one in known], "blue"),
        ("KV pool", [one.pool_bytes / gigabytes for one in known], "teal"),
        ("left", [(one.memory_left_bytes or 0) / gigabytes for one in known], "grey"),
    )
    return Chart.model_validate(
        {
            "kind": "stacked",
            "title": "Memory of one rank, as launches left it",
            "labels": [utc(datetime.fromtimestamp(one.observed_at, UTC)) for one in known],
            "series": [{"name": name, "values": values, "colour": colour} for name, values, colour in series],
            "x_title": "launch",
            "y_title": "GB",
        }
    )
