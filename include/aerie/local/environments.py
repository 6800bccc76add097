"""Makes Aerie's Python environments from their locks. Standard library only: it runs before any of them exists.

``python include/aerie/local/environments.py airflow model serve`` makes those that are missing or whose lock changed.

Airflow, the server and the trainer cannot share one environment. torch is installed on its own, through pip and
without a hash, so that a CPU build is taken where the installer offers one (``AERIE_TORCH_INDEX`` names an index of
CPU builds); everything else comes from locks with hashes.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
REQUIREMENTS = ROOT / "requirements"
HOME = Path(os.environ.get("AERIE_HOME", ROOT / ".aerie"))
TORCH = "torch==2.13.0"
WITH_TORCH = ("model", "serve")
FREE_GIB_NEEDED = {"airflow": 2, "model": 4, "serve": 6}
MARK = ".complete"


class SetupError(Exception):
    """Set-up cannot go on; the message says what a person has to do."""


def locks_of(environment: str) -> list[Path]:
    """Lock files of an environment."""
    return [
        path
        for path in (REQUIREMENTS / f"{environment}.txt", REQUIREMENTS / f"{environment}-no-deps.txt")
        if path.exists()
    ]


def wanted_mark(environment: str) -> str:
    """What the mark of a finished environment holds: it changes when a lock, torch or the interpreter does."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {TORCH} {os.environ.get('AERIE_TORCH_INDEX', '')}".encode())
    for lock in locks_of(environment):
        digest.update(lock.read_bytes())
    return digest.hexdigest()


def is_complete(environment: str) -> bool:
    """Whether the environment was made from the present locks, whole."""
    mark = HOME / "envs" / environment / MARK
    return mark.exists() and mark.read_text() == wanted_mark(environment)


def run(step: str, command: Sequence[str | Path], lock_descriptor: int) -> None:
    """Run one step; its output goes to the set-up log.

    The child inherits the lock, so that after a SIGKILL of this process a second set-up waits for what still writes.
    """
    log = HOME / "logs" / "setup.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": ""}
    for pip_name, uv_name in (("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), ("PIP_CERT", "SSL_CERT_FILE")):
        if pip_name in os.environ:
            environment.setdefault(uv_name, os.environ[pip_name])
    with log.open("ab") as output:
        status = subprocess.run(
            [str(part) for part in command], stdout=output, stderr=output, env=environment, pass_fds=[lock_descriptor]
        ).returncode
    if status:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        raise SetupError(
            f"{step} failed ({' '.join(last).strip()[:200]}): check the network (PIP_INDEX_URL names a mirror) "
            f"and the disk; the whole output is in {log}"
        )


def make_venv(folder: Path, lock_descriptor: int) -> Path:
    """Make an empty virtual environment with pip and return its interpreter."""
    shutil.rmtree(folder, ignore_errors=True)
    if subprocess.run([sys.executable, "-c", "import venv, ensurepip"], capture_output=True).returncode:
        raise SetupError(f"{sys.executable} has no venv module: install it (Debian: apt-get install python3.11-venv)")
    run(f"making {folder}", [sys.executable, "-m", "venv", folder], lock_descriptor)
    return folder / "bin" / "python"


def ensure_tools(lock_descriptor: int) -> Path:
    """Make the environment of the installer itself and return the installer."""
    folder = HOME / "envs" / "tools"
    if not is_complete("tools"):
        python = make_venv(folder, lock_descriptor)
        command: list[str | Path] = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--require-hashes",
            "-r",
            REQUIREMENTS / "tools.txt",
        ]
        run("installing the installer", command, lock_descriptor)
        (folder / MARK).write_text(wanted_mark("tools"))
    return folder / "bin" / "uv"


def make_environment(environment: str, lock_descriptor: int) -> None:
    """Make one environment from its locks."""
    folder = HOME / "envs" / environment
    free_gib = shutil.disk_usage(HOME).free / 2**30
    if free_gib < FREE_GIB_NEEDED[environment]:
        raise SetupError(
            f"{HOME}: {free_gib:.1f} GiB free, the {environment} environment needs {FREE_GIB_NEEDED[environment]}"
        )
    uv = ensure_tools(lock_descriptor)
    python = make_venv(folder, lock_descriptor)
    if environment in WITH_TORCH:
        index = os.environ.get("AERIE_TORCH_INDEX")
        source = ["--index-url", index] if index else []
        run("installing torch", [python, "-m", "pip", "install", "--quiet", *source, TORCH], lock_descriptor)
    for lock in locks_of(environment):
        command: list[str | Path] = [
            uv,
            "pip",
            "install",
            "--quiet",
            "--python",
            python,
            "--no-deps",
            "--require-hashes",
            "-r",
            lock,
        ]
        run(f"installing {lock.name}", command, lock_descriptor)
    (folder / MARK).write_text(wanted_mark(environment))


def ensure(environments: list[str]) -> None:
    """Make those environments that are missing, one set-up at a time.

    Raises:
        SetupError: something that a person has to see to.
    """
    if all(map(is_complete, environments)):
        return
    (HOME / "envs").mkdir(parents=True, exist_ok=True)
    with (HOME / "envs" / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("aerie: another set-up is running here; waiting for it", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        for environment in environments:
            if not is_complete(environment):
                print(f"aerie: making the {environment} environment ... ", end="", file=sys.stderr, flush=True)
                started = time.monotonic()
                make_environment(environment, lock.fileno())
                print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)


def main() -> None:
    """Make the environments named on the command line; one line and exit code 2 where that cannot be done."""
    try:
        ensure(sys.argv[1:])
    except (SetupError, OSError) as error:
        print(f"aerie: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
