"""``./aerie alerts``: what people were told of, and whether they can be told. Heavy imports stay inside."""

import os
import subprocess
import sys
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="What people are told of.")


@app.command("list")
def list_alerts(
    edition: Annotated[str | None, typer.Option(help="Only this edition's.")] = None,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, help="How many, from the latest.")] = 20,
) -> None:
    """Show the latest alerts, and what became of each."""
    from rich.console import Console
    from rich.table import Table

    from aerie.local.configuration import store_url
    from aerie.store.connection import connected
    from aerie.store.queries import alerts

    with connected(store_url(), application="aerie alerts") as connection:
        rows = alerts.list_alerts(connection, edition=edition, limit=limit)
    if not rows:
        typer.echo("no alerts")
        return
    table = Table("at", "edition", "data set", "reason", "message", "delivered")
    for row in rows:
        sent = f"{row['delivered_at']:%H:%M:%S}" if row["delivered_at"] else "no"
        became = f"{sent}; {row['delivery_error']}" if row["delivery_error"] else sent
        table.add_row(
            f"{row['at']:%Y-%m-%d %H:%M:%S}", row["edition"], row["dataset"], row["reason"], row["message"], became
        )
    # A pipe is no terminal of 80 columns.
    Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 200).print(table)


@app.command("test")
def send_a_test() -> None:
    """Send a test message to every receiver of the configured connection, and show what became of it."""
    from aerie.local.configuration import StackConfiguration, configuration_path
    from aerie.settings.machine import python_of

    # Airflow's connections are known to a process with Airflow's settings only.
    there = configuration_path().exists()
    environment = StackConfiguration.load_or_make().environment() if there else dict(os.environ)
    command = [str(python_of("airflow")), "-m", "aerie_airflow.try_alerts"]
    raise typer.Exit(subprocess.run(command, env=environment, check=False).returncode)
