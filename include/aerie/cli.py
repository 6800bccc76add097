"""The command line. Heavy imports stay inside the commands: ``aerie stage`` runs in three environments."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from aerie import __version__
from aerie.alerts_commands import app as alerts
from aerie.deploy_command import deploy
from aerie.errors import AerieError
from aerie.judging_commands import import_responses, show, validate
from aerie.masking import masked
from aerie.model_commands import fetch_model
from aerie.plan_commands import plan
from aerie.profile_commands import profiles
from aerie.quarantine_commands import app as quarantine
from aerie.server_commands import app as server
from aerie.settings.presets import DEFAULT_PRESET
from aerie.sources_commands import sources
from aerie.stage_commands import add_to as add_stage_commands
from aerie.trace_commands import trace

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
database = typer.Typer(no_args_is_help=True, help="Aerie's own database.")
app.add_typer(database, name="db")
app.add_typer(profiles, name="profile")
for command in (plan, validate, show, trace, import_responses, fetch_model, deploy):
    app.command()(command)
app.add_typer(alerts, name="alerts")
app.add_typer(quarantine, name="quarantine")
app.add_typer(server, name="server")
app.add_typer(sources, name="sources")
add_stage_commands(app)


def say(message: str) -> None:
    """Tell the person at the terminal what is being done."""
    typer.echo(f"aerie: {message}", err=True)


@app.command()
def setup() -> None:
    """Make the environments (done by every command that needs them)."""
    say("the environments are ready")


@app.command()
def up(
    preset: Annotated[
        str | None, typer.Option(help="Configuration that ships with Aerie (default: AERIE_CONFIG, else the last one).")
    ] = None,
) -> None:
    """Start PostgreSQL and Airflow, re-using what runs."""
    from aerie.local.stack import up as start

    configuration = start(say, preset=preset)
    typer.echo(f"Airflow: {configuration.airflow_url}  user admin  password {configuration.airflow_password}")


@app.command()
def down(
    purge: Annotated[
        bool, typer.Option(help="Also remove databases, data and environments made here; checkpoints stay.")
    ] = False,
) -> None:
    """Stop everything that Aerie started here, and nothing else."""
    from aerie.local.stack import down as stop

    stop(say, purge=purge)
    say("everything is stopped")


@app.command()
def status(
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until interrupted.")] = False,
) -> None:
    """Show what runs here, and how far the data sets that are generated now have come."""
    from aerie.local.status import show, watch_over

    if watch:
        watch_over()
    else:
        show()


@app.command()
def demo(
    once: Annotated[
        bool, typer.Option(help="Shut everything down at the end; exit 1 unless the run succeeded.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Where to write the summary as JSON.")] = None,
) -> None:
    """Run the main job on the sample sources and leave Airflow's UI open."""
    from aerie.local.watched_run import run_pipeline

    preset = None if os.environ.get("AERIE_CONFIG") else DEFAULT_PRESET
    if not run_pipeline(say, {}, once=once, summary_path=json, preset=preset):
        raise typer.Exit(1)


@app.command()
def pilot(
    edition: Annotated[
        str, typer.Option(help="Edition that the pilot begins and the whole run goes on with.")
    ] = "main",
    once: Annotated[bool, typer.Option(help="Shut everything down at the end.")] = False,
    json: Annotated[Path | None, typer.Option(help="Where to write the summary as JSON.")] = None,
) -> None:
    """Take a small share of the budgets through every step to the acceptance gate; exit 1 where it does not pass."""
    from aerie.local.watched_run import run_pipeline

    if not run_pipeline(say, {"edition": edition, "pilot": True}, once=once, summary_path=json):
        raise typer.Exit(1)
    say(f"the pilot passed; a run of edition {edition} without 'pilot' goes on from it")


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)
def airflow(context: typer.Context) -> None:
    """Run a command of Airflow's own on the local stack, such as ``airflow backfill create``."""
    from aerie.local.stack import airflow_command

    command, variables = airflow_command(context.args)
    os.execve(command[0], command, variables)  # noqa: S606 - no shell is meant


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def test(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Also what takes long, the whole demo among it.")] = False,
) -> None:
    """Run the tests, each where its code runs; further arguments go to pytest."""
    from aerie.local.testing import run_tests

    raise typer.Exit(run_tests(everything=everything, arguments=context.args))


@app.command()
def audit() -> None:
    """Look for known vulnerabilities of the locks' packages; exit 1 where one has any, 75 where nobody answers."""
    from aerie.local.audit import audit_locks

    audit_locks(say)


@app.command()
def stage(
    name: str,
    request: Annotated[Path, typer.Option(help="Request, a JSON document.")],
    result: Annotated[Path, typer.Option(help="Where to write the result.")],
    events: Annotated[Path, typer.Option(help="Where to append the events, JSON lines.")],
) -> None:
    """Run one stage of the pipeline in this environment."""
    from aerie.stages import run_stage

    run_stage(name, request=request, result=result, events=events)


@app.command(hidden=True)
def decode(
    request: Annotated[Path, typer.Option(help="Request of a stage, a JSON document.")],
    responses: Annotated[Path, typer.Option(help="Responses to decode, JSON lines.")],
    previews: Annotated[Path, typer.Option(help="Where to write them as text, JSON lines.")],
) -> None:
    """Decode responses for people to read (model environment)."""
    from aerie.boundary.decoding import decode_file

    decode_file(request, responses, previews)


@app.command(hidden=True)
def probe_texts(
    verifier: Annotated[Path, typer.Option(help="The configuration's verifier, a JSON document.")],
    out: Annotated[Path, typer.Option(help="Where to write the token ids, a JSON document.")],
) -> None:
    """Make the texts of the server's readiness probe (model environment)."""
    from aerie.prompts.probe_texts import write_probe_texts

    write_probe_texts(verifier, out)


@app.command(hidden=True)
def pools(
    existing: Annotated[Path, typer.Option(help="What ``airflow pools export`` wrote.")],
) -> None:
    """Print the pools to make and to widen, as ``airflow pools import`` reads them."""
    import json

    from aerie.placement import pools_to_write
    from aerie.settings.machine import settings_path
    from aerie.settings.pipeline import load_settings

    there = json.loads(existing.read_text(encoding="utf-8"))
    wanted = pools_to_write(load_settings(settings_path()), {name: pool["slots"] for name, pool in there.items()})
    # The import writes a pool whole: what a person set beside the slots comes along.
    documents = {
        pool.name: {"description": pool.description, **there.get(pool.name, {}), "slots": pool.slots} for pool in wanted
    }
    typer.echo(json.dumps(documents))


@database.command("migrate")
def database_migrate() -> None:
    """Bring Aerie's tables to the version of this code, and its users to their rights; nothing to do where they are.

    AERIE_DATABASE_OWNER_URL migrates; the users of AERIE_DATABASE_URL and AERIE_DATABASE_DASHBOARD_URL get only the
    rights that they need.
    """
    from aerie.settings.machine import dashboard_database_url, database_url, owner_database_url
    from aerie.store.migrate import migrate
    from aerie.store.roles import grant_rights

    migrate(owner_database_url())
    grant_rights(owner_database_url(), pipeline_url=database_url(), dashboard_url=dashboard_database_url())
    say("the database is up to date")


@app.command()
def version() -> None:
    """Print Aerie's version."""
    typer.echo(__version__)


def main() -> None:
    """Run the command line; an error of ours is one line, for a stage's log too, and its exit code."""
    try:
        app()
    except AerieError as error:
        say(masked(str(error)))
        sys.exit(error.exit_code)
