"""What the server is doing while it generates, as it says at ``/v1/loads``, and how busy its GPUs are."""

import asyncio
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from aerie.errors import AerieError
from aerie.generation.client import GenerateClient, RequestFailed
from aerie.generation.server import Server
from aerie.stages import Events

Amount = Annotated[float, Field(ge=0)]


class RankLoad(BaseModel):
    """Load of one data-parallel rank; ``token_usage`` is the share of its KV cache in use."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    num_running_reqs: Amount
    num_waiting_reqs: Amount
    token_usage: Amount
    gen_throughput: Amount


class Loads(BaseModel):
    """Answer of ``/v1/loads``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    loads: Annotated[list[RankLoad], Field(min_length=1)]


class ServerMonitor:
    """Looks at the server for the progress line. What cannot be read is None, and alerted once: never a zero."""

    def __init__(self, client: GenerateClient, server: Server, events: Events) -> None:
        self._client = client
        self._server = server
        self._events = events
        self._alerted = False
        self._gpu_utilisation: float | None = None

    async def renew(self) -> None:
        """Renew the server's lease; raises as ``Server.renew`` does."""
        self._gpu_utilisation = await asyncio.to_thread(self._server.renew)

    async def figures(self) -> dict[str, float | None]:
        """Requests running and queued, share of the KV cache in use (of the fullest rank), tokens/s, GPU share busy."""
        ranks = await self._ranks()
        return {
            "server_running": sum(rank.num_running_reqs for rank in ranks) if ranks else None,
            "server_queued": sum(rank.num_waiting_reqs for rank in ranks) if ranks else None,
            "server_token_usage": max(rank.token_usage for rank in ranks) if ranks else None,
            "server_tokens_per_second": sum(rank.gen_throughput for rank in ranks) if ranks else None,
            "gpu_utilisation": self._gpu_utilisation,
        }

    async def _ranks(self) -> list[RankLoad]:
        try:
            return (await self._client.ask("/v1/loads?include=core", Loads)).loads
        except (RequestFailed, AerieError) as error:
            if not self._alerted:
                self._events.alert("server_load_unknown", f"progress lines lack the server's load: {error}")
            self._alerted = True
            return []
