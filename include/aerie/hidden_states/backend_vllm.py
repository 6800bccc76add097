"""Capture by speculators' ``generate-offline-data`` from a ``vllm serve`` that extracts hidden states.

Its exit code says nothing: rows that it skips, it skips with 0. What it wrote is taken row by row, checked as every
other state file, and what is not there is named.
"""

import json
import shlex
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from datasets import load_from_disk
from hs_connectors import FileBackend

from aerie.artefacts.corpus import DATASET_FOLDER, CorpusRow
from aerie.artefacts.state_files import link_path
from aerie.errors import Failed, Retryable
from aerie.hidden_states.layers import CapturedLayers
from aerie.hidden_states.record import CaptureRecord
from aerie.ports import free_port
from aerie.processes import ProcessIdentity, die_with_parent, stop_trees
from aerie.serving.client import require_unused
from aerie.settings.machine import variables_of
from aerie.settings.pipeline import PipelineSettings
from aerie.settings.profile import checkpoint_code_allowed
from aerie.stages import Events, StageRequest

POLL_SECONDS = 0.5
STOP_SECONDS = 60.0
HEALTH_SECONDS = 5.0
TAIL_LINES = 20
NAMED_ROWS = 20
LOG_COLUMNS = "1200"  # rich wraps lines at the terminal's width


class VllmBackend:
    """A ``vllm serve`` of someone's, or one of this stage's own, and the extraction that asks it."""

    def __init__(self, request: StageRequest, layers: CapturedLayers, events: Events) -> None:
        self._request = request
        self._layers = layers
        self._events = events
        self._folder = request.files.hidden_states.resolve() / "vllm"

    def capture(self, rows: Iterator[CorpusRow], record: CaptureRecord) -> None:
        """As ``backends.Backend``.

        Raises:
            Busy: another run's server has the GPUs.
            Failed: the server or the extraction ends, or a state file is not what it should be.
            Retryable: rows were skipped; the message names them.
        """
        missing = [row for row in rows if not record.present(row)]
        if not missing:
            return
        shutil.rmtree(self._folder, ignore_errors=True)
        dataset, written = self._folder / "dataset", self._folder / "written"
        written.mkdir(parents=True)
        corpus = load_from_disk(str(self._request.files.corpus / DATASET_FOLDER))
        corpus.select([row.row for row in missing]).save_to_disk(str(dataset))
        taken = Taken(missing, written, record)
        with self._server() as url:
            self._extract(extraction_command(self._request.settings, url, dataset, written), taken)
        taken.require_all(self._folder / "extraction.log")
        shutil.rmtree(self._folder)

    @contextmanager
    def _server(self) -> Iterator[str]:
        """URL of a server that answers: someone's, or one that is started here and ended with the capture."""
        settings = self._request.settings
        vllm = settings.hidden_states.vllm
        storage = self._folder / "staged"
        command = server_command(settings, self._layers, storage, port=free_port())
        self._events.block("The server that extracts hidden states", [shlex.join(command)])
        if vllm.url is not None:
            yield vllm.url
            return
        require_unused(self._request.server_folder, by=self._request.run_id)
        log = self._folder / "vllm.log"
        url = f"http://127.0.0.1:{command[command.index('--port') + 1]}"
        with _process(command, log) as process:
            _wait_until_healthy(process, url, log, seconds=settings.serving.start_timeout_seconds)
            yield url

    def _extract(self, command: Sequence[str], taken: "Taken") -> None:
        log = self._folder / "extraction.log"
        with _process(command, log) as process:
            while process.poll() is None:
                taken.take()
                time.sleep(POLL_SECONDS)
        taken.take()
        if process.returncode != 0:
            raise Failed(f"speculators ended with exit code {process.returncode}; {log} ends with:\n{_tail(log)}")


class Taken:
    """Files that the extraction has written so far, moved to where state files belong."""

    def __init__(self, rows: Sequence[CorpusRow], written: Path, record: CaptureRecord) -> None:
        self._missing = {link_path(written, number): row for number, row in enumerate(rows)}
        self._rows = len(rows)
        self._record = record

    def take(self) -> None:
        """Take what is there: the extraction renames files into its folder, so that each is whole.

        Raises:
            Failed: a file is not what it should be.
        """
        for path in [path for path in self._missing if path.exists()]:
            row = self._missing.pop(path)
            path.replace(self._record.path_of(row))
            self._record.accept(row)
            self._record.report_if_due()

    def require_all(self, log: Path) -> None:
        """Refuse an extraction that skipped rows.

        Raises:
            Retryable: naming them.
        """
        if self._missing:
            names = [row.sample_id for row in self._missing.values()]
            more = f" and {len(names) - NAMED_ROWS} more" if len(names) > NAMED_ROWS else ""
            raise Retryable(
                f"vLLM's extraction ended with exit code 0, but skipped {len(names)} of {self._rows} rows: samples "
                f"{', '.join(names[:NAMED_ROWS])}{more}; {log} ends with:\n{_tail(log)}"
            )


def server_command(settings: PipelineSettings, layers: CapturedLayers, storage: Path, *, port: int) -> list[str]:
    """The ``vllm serve`` that extracts: auxiliary layers by what enters them, then the last layer's output.

    Args:
        settings: verifier, parallelism, memory and context as for the server that generates.
        layers: what is captured.
        storage: folder that server and extraction share, on the disk of the state files.
        port: where it listens.
    """
    verifier, serving, vllm = settings.verifier, settings.serving, settings.hidden_states.vllm
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {
            "hf_config": {"eagle_aux_hidden_state_layer_ids": [*layers.auxiliary, layers.decoder_layers]}
        },
    }
    connector = FileBackend.build_kv_transfer_config(Namespace(hidden_states_path=str(storage)))
    trusted = checkpoint_code_allowed(
        verifier.load_profile(), allowed=verifier.trust_remote_code, revision=verifier.revision
    )
    return [
        *(str(vllm.python or "python"), "-m", "vllm.entrypoints.cli.main", "serve", str(verifier.path)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", verifier.dtype),
        *("--tensor-parallel-size", str(serving.tensor_parallel_size)),
        *("--gpu-memory-utilization", f"{serving.mem_fraction_static:g}"),
        *("--max-model-len", str(serving.context_length)),
        # A prefix that is in the cache is not computed, and has no states.
        "--no-enable-prefix-caching",
        *("--speculative-config", json.dumps(speculative)),
        *("--kv-transfer-config", json.dumps(connector)),
        *(["--trust-remote-code"] if trusted else []),
        *vllm.arguments,
    ]


def extraction_command(settings: PipelineSettings, url: str, dataset: Path, written: Path) -> list[str]:
    """Speculators' extraction of a data set's rows, into ``hs_<row>`` files in ``written``."""
    return [
        *(sys.executable, "-m", "speculators", "generate-offline-data"),
        *("--model", str(settings.verifier.path)),
        *("--endpoint", f"{url}/v1"),
        *("--preprocessed-data", str(dataset)),
        *("--output", str(written)),
        *("--concurrency", str(settings.hidden_states.concurrency)),
        *("--request-timeout", str(settings.generation.request_timeout_seconds)),
    ]


@contextmanager
def _process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes to ``log`` and does not outlive this one."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**variables_of("model"), "COLUMNS": LOG_COLUMNS},
            preexec_fn=die_with_parent,
        )
        try:
            yield process
        finally:
            # With its workers, which hold the GPUs.
            if identity := ProcessIdentity.of_or_none(process.pid):
                stop_trees([identity], grace_seconds=STOP_SECONDS)
            process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not _answers(url):
        if process.poll() is not None:
            raise Failed(f"vllm serve ended with exit code {process.returncode}; {log} ends with:\n{_tail(log)}")
        if time.monotonic() > deadline:
            raise Failed(f"vllm serve was not ready within {seconds:.0f} s; {log} ends with:\n{_tail(log)}")
        time.sleep(POLL_SECONDS)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=HEALTH_SECONDS).is_success
    except httpx.TransportError:
        return False


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])
