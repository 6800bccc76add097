"""The locks held against published vulnerabilities, by pip-audit, which asks PyPI about each package."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aerie.errors import Failed, Retryable
from aerie.local.environments import TORCH
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.profile import Frozen
from aerie.settings.yaml_files import read_mapping, validate

REQUIREMENTS = PROJECT_ROOT / "requirements"
ACCEPTED_FILE = REQUIREMENTS / "accepted-vulnerabilities.yaml"
PIP_AUDIT = (sys.executable, "-m", "pip_audit")
LIMIT_SECONDS = 900


class Accepted(Frozen):
    """A vulnerability that a person looked at: why it does not matter here, and the last day on which that holds."""

    package: str
    reason: Annotated[str, Field(min_length=10)]
    until: date


class AcceptedFile(Frozen):
    """Accepted vulnerabilities by their id, whichever of its ids that is."""

    accepted: Mapping[str, Accepted]


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Vulnerability(_Said):
    """A published vulnerability, as pip-audit tells it."""

    id: str
    aliases: tuple[str, ...] = ()
    fix_versions: tuple[str, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        """Every name that it has."""
        return (self.id, *self.aliases)


class Package(_Said):
    """A package, as pip-audit tells it: skipped, or looked up at its version."""

    name: str
    version: str | None = None
    skip_reason: str | None = None
    vulns: tuple[Vulnerability, ...] = ()


class Report(_Said):
    """pip-audit's answer about one file of requirements."""

    dependencies: tuple[Package, ...]


def audit_locks(
    say: Callable[[str], None],
    *,
    requirements: Path = REQUIREMENTS,
    accepted: Path = ACCEPTED_FILE,
    command: Sequence[str] = PIP_AUDIT,
) -> None:
    """Look up every package of the locks, and the torch that is installed beside them.

    Raises:
        Failed: a package has a known vulnerability that is not accepted; names them all.
        Retryable: PyPI answered about none of the packages, or about no more of them.
        BadInput: the file of accepted vulnerabilities is wrong.
    """
    known = validate(AcceptedFile, read_mapping(accepted), where=accepted).accepted
    packages: dict[tuple[str, str | None], Package] = {}
    with tempfile.TemporaryDirectory() as folder:
        torch = Path(folder) / "torch.txt"
        torch.write_text(f"{TORCH}\n", encoding="utf-8")
        # The shortest first: it shows whether there is an answer to be had.
        for lock in sorted([*requirements.glob("*.txt"), torch], key=lambda path: path.stat().st_size):
            packages |= {(one.name, one.version): one for one in _audit(lock, command).dependencies}
            if all(one.skip_reason for one in packages.values()) and len(packages) > 1:
                reason = next(one.skip_reason for one in packages.values())
                raise Retryable(
                    f"THE LOCKS WERE NOT AUDITED: PyPI tells nothing from here ({reason}); run ./aerie audit where "
                    "it is reached without a mirror"
                )
    _tell(say, list(packages.values()), known)


def _audit(lock: Path, command: Sequence[str]) -> Report:
    arguments = ["--requirement", str(lock), "--no-deps", "--disable-pip", "--format", "json", "--desc", "off"]
    done = subprocess.run(
        [*command, *arguments, "--aliases", "on", "--progress-spinner", "off"],
        capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS,
    )  # fmt: skip
    try:
        return Report.model_validate_json(done.stdout)
    except ValidationError as error:
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise Retryable(f"THE LOCKS WERE NOT AUDITED: pip-audit failed on {lock.name}: {said}") from error


def _tell(say: Callable[[str], None], packages: Sequence[Package], accepted: Mapping[str, Accepted]) -> None:
    today = date.today()  # noqa: DTZ011 - the day where the person is
    refused: list[str] = []
    for package, vulnerability in _found(packages):
        because = next((accepted[name] for name in vulnerability.ids if name in accepted), None)
        fixed = ", ".join(vulnerability.fix_versions) or "no version yet"
        told = f"{package.name} {package.version}: {', '.join(vulnerability.ids)} (fixed in {fixed})"
        if because is not None and because.package == package.name and because.until >= today:
            say(f"accepted until {because.until}: {told}: {because.reason}")
        else:
            refused.append(told)
    for package in packages:
        if package.skip_reason:
            say(f"not audited: {package.name}: {package.skip_reason}")
    stale = accepted.keys() - {name for _, vulnerability in _found(packages) for name in vulnerability.ids}
    for name in sorted(stale):
        say(f"no longer found, take it out of {ACCEPTED_FILE.name}: {name} ({accepted[name].package})")
    if refused:
        raise Failed(
            f"known vulnerabilities: {'; '.join(refused)}: take the fixed version (requirements/lock), or say in "
            f"requirements/{ACCEPTED_FILE.name} why it does not matter here"
        )
    audited = sum(not package.skip_reason for package in packages)
    say(f"{audited:,} packages audited, no known vulnerability that is not accepted")


def _found(packages: Sequence[Package]) -> Iterator[tuple[Package, Vulnerability]]:
    for package in packages:
        for vulnerability in package.vulns:
            yield package, vulnerability
