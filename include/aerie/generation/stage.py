"""Stage ``generate``: responses for the prompts of one data set, up to its budget."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.alerting import BUDGET_REACHED
from aerie.artefacts.files import fingerprint_of
from aerie.artefacts.layout import DatasetFiles
from aerie.artefacts.manifest import (
    answered_by,
    describe_input,
    describe_output,
    read_manifest,
    write_manifest,
)
from aerie.artefacts.response_log import Response, ResponseLog
from aerie.artefacts.superseded import read_superseded, superseded_file
from aerie.artefacts.verifier_tokens import VerifierTokens, read_verifier_tokens
from aerie.boundary import Grammar, Verdict, apply_policy, check_drop_flags, grammar_of_verifier, judge
from aerie.errors import AerieError, BadInput, Failed
from aerie.generation.budget import Limits, decide
from aerie.generation.canary_show import CanaryShow
from aerie.generation.client import GenerateClient, RequestFailed, ServerGone
from aerie.generation.driver import Driver
from aerie.generation.fingerprints import Fingerprinted, generation_settings, hold_generation, rules_settings
from aerie.generation.load import ServerMonitor
from aerie.generation.population import Population, Stop
from aerie.generation.prompts import GenerationPrompt, load_prompts
from aerie.generation.reconciliation import differing, reconcile
from aerie.generation.reporting import Reporter
from aerie.generation.server import Server, check_server, ensure, stays_silent, summary_of
from aerie.generation.stalls import Stalled, StallWatch, Stuck
from aerie.generation.states import MOST_ASKED_AT_ONCE, StateKeeper, open_states
from aerie.generation.writer import DatasetWriter
from aerie.serving.sampling import sampling_parameters
from aerie.settings.machine import database_url
from aerie.settings.pipeline import DatasetSettings
from aerie.stages import Events, StageRequest, StageResult
from aerie.store.connection import Connection
from aerie.store.migrate import migrate
from aerie.store.queries.ledger import delete_rows, read_ledger, write_rows
from aerie.store.queries.runs import read_edition, record_edition, record_stop

STAGE = "generate"
ALIVE_SECONDS = 3.0
RENEWALS_PER_LEASE = 4
LONGEST_RENEWAL_SECONDS = 5.0  # a renewal also tells of a child process that died behind a healthy port
FIRST_BACKOFF_SECONDS = 1.0
DAMAGES_NAMED = 20  # of a log that is damaged all over


@dataclass(frozen=True)
class Job:
    """One request, with what it is about looked up once."""

    request: StageRequest
    events: Events
    dataset: str
    settings: DatasetSettings
    files: DatasetFiles
    tokens: VerifierTokens
    grammar: Grammar
    drop_flags: frozenset[str]
    generation: Fingerprinted
    rules: Fingerprinted

    @classmethod
    def of(cls, request: StageRequest, events: Events) -> "Job":
        """Look up what a request is about.

        Raises:
            BadInput: the request names no generated data set, or ``prepare`` has not finished.
        """
        settings, dataset = request.dataset_settings, str(request.dataset)
        if settings.kind != "generated":
            raise BadInput(f"{dataset} is already tokenised: there is nothing to generate; run stage import")
        files = request.files.dataset(dataset)
        prepared = read_manifest(files.manifest("prepare"))
        tokens = read_verifier_tokens(files.verifier_tokens)
        profile = request.settings.verifier.load_profile()
        return cls(
            request=request,
            events=events,
            dataset=dataset,
            settings=settings,
            files=files,
            tokens=tokens,
            grammar=grammar_of_verifier(profile, tokens),
            drop_flags=check_drop_flags(settings.drop_flags),
            generation=generation_settings(request.settings, settings, prepared=prepared, tokens=tokens),
            rules=rules_settings(request.settings, settings, tokens=tokens),
        )

    @property
    def where(self) -> str:
        """Edition and data set, for messages."""
        return f"{self.request.edition}/{self.dataset}"

    @property
    def thinking(self) -> bool:
        """Whether the verifier is asked to reason."""
        verifier = self.request.settings.verifier
        return verifier.thinking and verifier.load_profile().reasoning.opens_in != "never"

    @property
    def key(self) -> dict[str, str]:
        """Edition and data set, as the store's queries take them."""
        return {"edition": self.request.edition, "dataset": self.dataset}

    @property
    def fingerprint(self) -> str:
        """What a finished stage answers: tokens, verdicts, and how much was asked for."""
        asked = {"budget_tokens", "max_generated_tokens", "max_total_tokens", "max_samples", "max_prompts"}
        return fingerprint_of(
            {
                "generation": self.generation.fingerprint,
                "rules": self.rules.fingerprint,
                "asked": self.settings.model_dump(mode="json", include=asked),
            }
        )

    def alert(self, reason: str, message: str) -> None:
        """Tell a person of something about this data set."""
        self.events.alert(reason, f"{self.where}: {message}")

    def judge(self, prompt: GenerationPrompt, response: Response) -> Verdict:
        """The verdict on a response under the data set's policy."""
        verdict = judge(
            prompt.prompt_ids,
            response.output_ids,
            grammar=self.grammar,
            finish_reason=response.finish_reason,
            completion_tokens=response.completion_tokens,
            max_new_tokens=response.max_new_tokens,
        )
        return apply_policy(verdict, self.drop_flags)


def generate(request: StageRequest, events: Events) -> StageResult:
    """Generate a data set up to its budget, going on from whatever earlier runs left.

    Raises:
        BadInput: an input is missing, the responses are of other settings, or the server is not the one planned.
        Failed: something is wrong with the responses or the server's answers (canary, quarantine rate, errors), or the
            cost ceiling is reached.
        Busy: another process writes this data set.
        Retryable: the server, the database or the disk is gone; the next try goes on.
    """
    job = Job.of(request, events)
    asked_again = superseded_file(job.files.responses)
    paths = (job.files.prompts, job.files.verifier_tokens, *((asked_again,) if asked_again.exists() else ()))
    inputs = [describe_input(path) for path in paths]
    manifest_path = job.files.manifest(STAGE)
    answered = (
        None
        if request.force
        else answered_by(manifest_path, fingerprint=job.fingerprint, inputs=inputs, check_contents=True)
    )
    if answered is not None:
        events.progress(f"nothing to do: {job.dataset} stopped by {answered.counts['stopped_by']}, as asked")
        return StageResult(stage=STAGE, reused=True, manifest=answered)
    # A manifest must not outlive the log that it describes.
    manifest_path.unlink(missing_ok=True)
    url = database_url()
    migrate(url)
    with DatasetWriter(url, **job.key, run_id=request.run_id, lock_path=job.files.writer_lock) as writer:
        stop, counts, log_rows = _generate_past_a_stall(job, writer)
    stopped = f"{job.where} stopped by {stop.reason}: {stop.message}"
    if stop.failed:
        # In the words of the error: whoever tells of both tells once.
        events.alert(stop.reason, stopped)
        raise Failed(stopped)
    if stop.reason != "prompts_exhausted":
        events.alert(BUDGET_REACHED, stopped)
    manifest = write_manifest(
        manifest_path,
        stage=STAGE,
        edition=request.edition,
        dataset=job.dataset,
        fingerprint=job.fingerprint,
        inputs=inputs,
        outputs=[describe_output(path, rows) for path, rows in sorted(log_rows.items())],
        counts=counts,
    )
    return StageResult(stage=STAGE, reused=False, manifest=manifest)


def _generate_past_a_stall(job: Job, writer: DatasetWriter) -> tuple[Stop, dict[str, Any], Mapping[Path, int]]:
    """As ``_generate``; where the server gets stuck, once more with another.

    Raises:
        Failed: that one got stuck too.
    """
    try:
        return _generate(job, writer)
    except Stuck as stuck:
        job.events.alert("server_stuck", f"{job.where}: {stuck}; it is started again, once")
    try:
        return _generate(job, writer)
    except Stuck as again:
        job.events.alert("server_stuck", f"{job.where}: {again}")
        raise Failed(f"{job.where}: the server got stuck again after it was restarted: {again}") from again


def _generate(job: Job, writer: DatasetWriter) -> tuple[Stop, dict[str, Any], Mapping[Path, int]]:
    """Reconcile, generate what is missing, and record why it stopped; the caller is the only writer.

    Returns why, the manifest's counts, and the rows of each file of the log.
    """
    with ResponseLog(job.files.responses) as log:
        with _without_collection():
            population = _reconciled(job, writer.connection, log)
        reporter = Reporter(job.events, population, dataset=job.dataset)
        if population.pending() and (population.owed or decide(population.limits, population.counts).reached is None):
            stop = asyncio.run(_drive(job, writer, log, population, reporter))
        else:
            stop = population.conclude()
    record_stop(writer.connection, **job.key, stopped_by=stop.reason, message=stop.message)
    reporter.close(stop, output=job.files.responses)
    counts = _counts(job, population, stop, seconds=reporter.seconds)
    return stop, {**counts, "log_rows": log.row_counts.total()}, log.row_counts


def _reconciled(job: Job, connection: Connection, log: ResponseLog) -> Population:
    """Rebuild the ledger from the log, and write what differs."""
    _report_repair(job, log)
    prompts = load_prompts(job.files.prompts, job.settings, context_length=job.request.settings.serving.context_length)
    held = hold_generation(
        job.files.folder / "generation.json",
        job.generation,
        log_has_rows=log.row_counts.total() > 0,
        where=job.where,
    )
    edition = read_edition(connection, **job.key)
    ledger = read_ledger(connection, **job.key)
    same_rules = held and edition is not None and edition["rules_fingerprint"] == job.rules.fingerprint
    known = ledger if same_rules else {}
    superseded = read_superseded(job.files.responses)
    rows = reconcile(prompts, known, log.take_rows(), judge=job.judge, where=job.where, superseded=superseded)
    changed = differing(ledger, rows)
    record_edition(
        connection,
        **job.key,
        generation_fingerprint=job.generation.fingerprint,
        generation_settings=job.generation.settings,
        rules_fingerprint=job.rules.fingerprint,
        rules_settings=job.rules.settings,
    )
    delete_rows(connection, **job.key, sample_ids=[sample_id for sample_id in ledger if sample_id not in rows])
    write_rows(connection, **job.key, rows=changed)
    population = Population(
        prompts,
        rows,
        limits=Limits.of(job.settings),
        max_prompts=job.settings.max_prompts,
        canary=job.settings.canary,
        about_tools=job.settings.about_tools,
        thinking=job.thinking,
        settings=job.request.settings.generation,
        alert=job.alert,
        regenerate=superseded.keys(),
    )
    job.events.progress(
        f"{job.where}: {len(prompts):,} prompts, {population.counts.judged:,} responses from earlier runs, "
        f"{len(changed):,} ledger rows brought in line with the log"
    )
    return population


@contextmanager
def _without_collection() -> Iterator[None]:
    """Load what stays: the garbage collector would walk all of it again and again, now and while requests run."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _report_repair(job: Job, log: ResponseLog) -> None:
    repaired = log.repaired
    if repaired.torn is not None:
        job.events.progress(
            f"{log.path}: cut {repaired.torn.size} bytes at byte {repaired.torn.offset}, an incomplete row of an "
            "earlier run; its sample is generated again"
        )
    for damage in repaired.damaged[:DAMAGES_NAMED]:
        job.events.alert("damaged_row", f"{damage}; it was set aside, and its sample is generated again")
    if len(repaired.damaged) > DAMAGES_NAMED:
        job.events.alert("damaged_row", f"{log.path}: {len(repaired.damaged):,} places in all were damaged")


async def _drive(job: Job, writer: DatasetWriter, log: ResponseLog, population: Population, reporter: Reporter) -> Stop:
    request, settings = job.request, job.request.settings
    counts = population.counts
    folder = await asyncio.to_thread(
        open_states,
        request,
        population.eligible,
        job.events,
        mean_response_tokens=counts.kept_response_tokens / counts.kept if counts.kept else None,
    )
    server = await asyncio.to_thread(_ensure_server, request, job.events)
    profile = settings.verifier.load_profile()
    stop_ids = [job.tokens.token_ids[token] for token in profile.end_of_turn]
    async with GenerateClient.open(
        server.url,
        concurrency=job.settings.concurrency + (MOST_ASKED_AT_ONCE if folder else 0),
        sampling=sampling_parameters(settings.load_sampling(), stop_token_ids=stop_ids),
        request_timeout_seconds=settings.generation.request_timeout_seconds,
        maximum_attempts=settings.generation.maximum_attempts,
        first_backoff_seconds=FIRST_BACKOFF_SECONDS,
    ) as client:
        await _check_server(client, job, server)
        canary = CanaryShow(request, job.events, population, reporter)
        states = None if folder is None else StateKeeper(client, folder, job.alert)
        driver = Driver(
            population,
            client=client,
            log=log,
            write_ledger=writer.write,
            judge=job.judge,
            concurrency=job.settings.concurrency,
            launch_token=server.launch_token,
            rid_prefix=f"{job.where}:{request.run_id}",
            canary_finished=canary.show,
            states=states,
        )

        monitor = ServerMonitor(client, server, job.events)
        watch = StallWatch(
            client,
            in_flight=lambda: driver.in_flight,
            stall_seconds=settings.serving.stall_seconds,
            events=job.events,
        )
        reporter.restart_clock()

        async def report() -> None:
            reporter.progress(driver.in_flight, await monitor.figures())

        renewal_seconds = min(settings.serving.lease_seconds / RENEWALS_PER_LEASE, LONGEST_RENEWAL_SECONDS)
        regularly = (
            (settings.generation.progress_seconds, report),
            (renewal_seconds, monitor.renew),
            (ALIVE_SECONDS, client.confirm_alive),
            (watch.period_seconds, watch.look),
        )
        helpers = [asyncio.create_task(_repeat(seconds, action, driver)) for seconds, action in regularly]
        try:
            canary.show_if_it_was_not()
            stop = await driver.run()
            await canary.shown()
            if states is not None:
                await states.settle()
                job.events.progress(
                    f"{job.where}: hidden states of {states.written:,} samples were captured while generating, "
                    f"{states.left:,} are left to the stage capture"
                )
            return stop
        except (Stalled, ServerGone) as error:
            await asyncio.to_thread(_end_if_stuck, server, error, settings.serving.stall_seconds)
            raise
        finally:
            beside = (*helpers, *canary.tasks, *(states.tasks if states else ()))
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)


def _end_if_stuck(server: Server, error: Stalled | ServerGone, stall_seconds: float) -> None:
    """End a server that makes nothing any more and yet lives; its next try would find it as it is.

    Raises:
        Stuck: it was ended; its evidence is in the message.
        LeaseLost: somebody else has ended it already.
        AerieError: it cannot be ended.
    """
    if server.end_stuck is None or (isinstance(error, ServerGone) and not stays_silent(server, stall_seconds)):
        return
    stuck = server.end_stuck()
    raise Stuck(f"{error}. {summary_of(stuck)}") from error


def _ensure_server(request: StageRequest, events: Events) -> Server:
    """Have the server that the settings plan for generation, through its keeper."""
    return ensure(request, events)


async def _repeat(seconds: float, action: Callable[[], Awaitable[None]], driver: Driver) -> None:
    """Do something regularly until cancelled; when it fails, the run ends with its error."""
    try:
        while True:
            await asyncio.sleep(seconds)
            await action()
    except Exception as error:
        driver.end(error)
        if not isinstance(error, AerieError):
            raise


async def _check_server(client: GenerateClient, job: Job, server: Server) -> None:
    try:
        info = await client.server_info()
    except RequestFailed as error:
        raise BadInput(f"the server at {server.url} does not describe itself as SGLang does: {error}") from error
    check_server(info, job.request.settings, url=server.url)
    job.events.progress(
        f"server {server.url}: SGLang {info.version}, {info.dtype}, KV cache {info.kv_cache_dtype}, "
        f"{info.max_total_num_tokens:,} KV tokens"
    )


def _counts(job: Job, population: Population, stop: Stop, *, seconds: float) -> dict[str, Any]:
    """Counts for the manifest; the six states add up to ``prompts``."""
    counts, states = population.counts, population.count_states()
    kept = [row for row in population.rows.values() if row.state == "kept"]
    return {
        "prompts": len(population.rows),
        "generated": counts.judged,
        "kept": states["kept"],
        "quarantined": states["quarantined"],
        "flagged": sum(1 for row in kept if row.flags),
        **population.count_truncated(),
        "failed": states["failed"],
        "skipped": states["skipped"],
        "pending": states["pending"],
        "response_tokens": counts.kept_response_tokens,
        "prompt_tokens": counts.kept_prompt_tokens,
        "generated_tokens": counts.generated_tokens,
        "budget": job.settings.budget_tokens,
        "stopped_by": stop.reason,
        "stop_message": stop.message,
        "seconds": round(seconds, 3),
    }
