"""``aerie profile``: the profiles that ship, and whether a checkpoint fits one. Heavy imports stay inside."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

profiles = typer.Typer(no_args_is_help=True, help="Profiles of model families.")


@profiles.command("list")
def list_profiles() -> None:
    """Print the names of the profiles that ship, with the model types that they are for."""
    from aerie.settings.profile import load_profile, profile_names

    for name in profile_names():
        typer.echo(f"{name:18} {', '.join(load_profile(name).model_types)}")


@profiles.command()
def check(
    model: Annotated[Path, typer.Option(help="The checkpoint's folder; the weights are not read.")],
    profile: Annotated[
        str | None, typer.Option(help="Profile to check (default: every one for the checkpoint's model_type).")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the checkpoint's own tokenizer code run; needs --revision.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Commit of the checkpoint.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Tell everything in which a checkpoint fits a profile or does not; exit 0 one fits, 1 none, 2 unreadable."""
    from aerie.judging_commands import move_to_model_environment

    move_to_model_environment()
    from aerie.prompts.profile_check import candidate_profiles, check_profile
    from aerie.settings.pipeline import VerifierSettings

    names = [profile] if profile else candidate_profiles(model)
    reports = [
        check_profile(
            VerifierSettings(path=model, profile=name, trust_remote_code=trust_remote_code, revision=revision)
        )
        for name in names
    ]
    fits = any(report.fits for report in reports)
    if as_json:
        described = [{**asdict(report), "fits": report.fits} for report in reports]
        typer.echo(json.dumps({"model": str(model), "fits": fits, "profiles": described}, indent=2, ensure_ascii=False))
    else:
        for report in reports:
            typer.echo(f"{report.profile}: {'fits' if report.fits else 'does not fit'}")
            for finding in report.findings:
                typer.echo(f"  {finding.outcome:8} {finding.subject}: {finding.detail}")
        if not reports:
            typer.echo(f"{model}: no profile is for its model_type; ./aerie profile list shows which there are")
    raise typer.Exit(0 if fits else 1)
