"""What becomes of pip-audit's answers; a script stands in for the tool, because its service is not always reached."""

import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.errors import BadInput, Failed, Retryable
from aerie.local.audit import ACCEPTED_FILE, AcceptedFile, audit_locks
from aerie.settings.machine import PROJECT_ROOT

TODAY = datetime.now(UTC).date()
SKIPPED = "Dependency not found on PyPI and could not be audited"
FLAW = {"id": "PYSEC-2026-1", "fix_versions": ["2.0"], "aliases": ["CVE-2026-1", "GHSA-aaaa"]}
STAND_IN = """\
import json, pathlib, sys
lock = pathlib.Path(sys.argv[sys.argv.index("--requirement") + 1])
answer = json.loads(pathlib.Path(__file__).with_name("answers.json").read_text())[lock.name]
if isinstance(answer, str):
    sys.exit(answer)
print(json.dumps({"dependencies": answer, "fixes": []}))
sys.exit(any(one.get("vulns") for one in answer))
"""


def package(name: str, *vulnerabilities: dict[str, Any], version: str = "1.0") -> dict[str, Any]:
    return {"name": name, "version": version, "vulns": list(vulnerabilities)}


def skipped(name: str) -> dict[str, Any]:
    return {"name": name, "skip_reason": f"{SKIPPED}: {name} (1.0)"}


class Audited:
    """Locks, what the tool says of each, and what a person was told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: list[str] = []
        self.answers: dict[str, Any] = {"torch.txt": [package("torch")]}
        self.accept({})
        (folder / "stand_in.py").write_text(STAND_IN, encoding="utf-8")
        (folder / "locks").mkdir()

    def lock(self, name: str, answer: Any) -> None:
        self.answers[name] = answer
        (self.folder / "locks" / name).write_text(f"{'one==1.0' * 100}\n", encoding="utf-8")

    def accept(self, accepted: dict[str, Any]) -> None:
        (self.folder / "accepted.yaml").write_text(yaml.safe_dump({"accepted": accepted}), encoding="utf-8")

    def run(self) -> list[str]:
        (self.folder / "answers.json").write_text(json.dumps(self.answers), encoding="utf-8")
        audit_locks(
            self.told.append,
            requirements=self.folder / "locks",
            accepted=self.folder / "accepted.yaml",
            command=[sys.executable, str(self.folder / "stand_in.py")],
        )
        return self.told


@pytest.fixture
def audited(tmp_path: Path) -> Audited:
    return Audited(tmp_path)


def test_locks_without_a_known_vulnerability_pass_and_are_counted_once(audited: Audited) -> None:
    audited.lock("a.txt", [package("one"), package("two")])
    audited.lock("b.txt", [package("one")])
    assert audited.run() == ["3 packages audited, no known vulnerability that is not accepted"]


def test_a_vulnerability_in_any_lock_fails_with_package_version_names_and_remedy(audited: Audited) -> None:
    audited.lock("a.txt", [package("one")])
    audited.lock("b.txt", [package("two", FLAW, version="1.5")])
    with pytest.raises(Failed, match=r"two 1\.5: PYSEC-2026-1, CVE-2026-1, GHSA-aaaa \(fixed in 2\.0\): take"):
        audited.run()


def test_the_torch_beside_the_locks_is_audited_too(audited: Audited) -> None:
    audited.lock("a.txt", [package("one")])
    audited.answers["torch.txt"] = [package("torch", {**FLAW, "fix_versions": []})]
    with pytest.raises(Failed, match=r"torch .* \(fixed in no version yet\)"):
        audited.run()


@pytest.mark.parametrize("name", ["PYSEC-2026-1", "CVE-2026-1"])
def test_an_accepted_vulnerability_passes_and_is_told_with_its_reason(audited: Audited, name: str) -> None:
    audited.lock("a.txt", [package("two", FLAW)])
    audited.accept({name: {"package": "two", "reason": "in code that nobody calls", "until": TODAY}})
    accepted, _ = audited.run()
    assert accepted.startswith(f"accepted until {TODAY}: two 1.0: ") and accepted.endswith("in code that nobody calls")


@pytest.mark.parametrize(
    "change", [{"until": TODAY - timedelta(days=2)}, {"package": "another"}], ids=["over", "of another package"]
)
def test_what_was_accepted_for_another_time_or_package_fails(audited: Audited, change: dict[str, Any]) -> None:
    audited.lock("a.txt", [package("two", FLAW)])
    entry = {"package": "two", "reason": "in code that nobody calls", "until": TODAY + timedelta(days=9)}
    audited.accept({"CVE-2026-1": {**entry, **change}})
    with pytest.raises(Failed, match=r"two 1\.0: PYSEC-2026-1"):
        audited.run()


def test_an_acceptance_that_nothing_needs_any_more_is_told(audited: Audited) -> None:
    audited.lock("a.txt", [package("two")])
    audited.accept({"CVE-2026-1": {"package": "two", "reason": "in code that nobody calls", "until": TODAY}})
    assert audited.run()[0] == f"no longer found, take it out of {ACCEPTED_FILE.name}: CVE-2026-1 (two)"


def test_an_acceptance_without_a_reason_is_refused(audited: Audited) -> None:
    audited.lock("a.txt", [package("two", FLAW)])
    audited.accept({"CVE-2026-1": {"package": "two", "reason": "", "until": TODAY}})
    with pytest.raises(BadInput, match=r"accepted\.CVE-2026-1\.reason"):
        audited.run()


def test_a_package_that_was_skipped_is_named_as_not_audited(audited: Audited) -> None:
    audited.lock("a.txt", [package("one"), skipped("local-build")])
    not_audited, counted = audited.run()
    assert not_audited == f"not audited: local-build: {SKIPPED}: local-build (1.0)"
    assert counted.startswith("2 packages audited")


def test_a_service_that_knows_no_package_is_not_taken_for_a_clean_bill(audited: Audited) -> None:
    """As a mirror answers; pip-audit itself exits 0 then, and says that nothing was found."""
    audited.answers["torch.txt"] = [skipped("torch")]
    audited.lock("a.txt", [skipped("one")])
    with pytest.raises(Retryable, match=r"THE LOCKS WERE NOT AUDITED: PyPI tells nothing from here .*torch"):
        audited.run()


def test_a_service_that_is_not_reached_is_not_taken_for_a_clean_bill(audited: Audited) -> None:
    audited.lock("a.txt", "ConnectionError: no route to host")
    with pytest.raises(Retryable, match=r"NOT AUDITED: pip-audit failed on a\.txt: ConnectionError: no route to host"):
        audited.run()


def test_the_projects_own_acceptances_can_be_read() -> None:
    AcceptedFile.model_validate(yaml.safe_load(ACCEPTED_FILE.read_text(encoding="utf-8")))


def test_ci_audits_the_locks_and_stops_at_a_vulnerability_but_not_where_it_cannot_ask() -> None:
    script = (PROJECT_ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert './aerie audit || [ "$?" = 75 ]\n' in script
