"""Where things are on this machine, from the environment variables that ``./aerie`` sets."""

import os
from pathlib import Path
from typing import Literal

from aerie.errors import BadInput

PROJECT_ROOT = Path(__file__).resolve().parents[3]

# Only control-side stages use the store.
CONTROL_SIDE_VARIABLES = ("AERIE_DATABASE_URL",)
# Of no business to any stage: Airflow's database, keys and connections, and who may change the store's tables.
HIDDEN_PREFIXES = ("AIRFLOW_", "AERIE_DATABASE_OWNER_URL", "AERIE_DATABASE_DASHBOARD_URL")


def aerie_home() -> Path:
    """Folder of everything that Aerie makes on this machine (``AERIE_HOME``, default ``.aerie`` in the clone)."""
    return Path(os.environ.get("AERIE_HOME", PROJECT_ROOT / ".aerie"))


def data_root() -> Path:
    """Folder of the editions (``AERIE_DATA_ROOT``, default ``data`` in the home folder)."""
    return Path(os.environ.get("AERIE_DATA_ROOT", aerie_home() / "data"))


def models_root() -> Path:
    """Folder of the checkpoints (``AERIE_MODELS``, default ``models`` in the home folder)."""
    return Path(os.environ.get("AERIE_MODELS", aerie_home() / "models"))


def server_folder() -> Path:
    """Folder of the server's lease, log and keeper (``AERIE_SERVER_FOLDER``, default ``server`` in the home folder)."""
    return Path(os.environ.get("AERIE_SERVER_FOLDER", aerie_home() / "server"))


def run_folder(run_id: str) -> Path:
    """Folder of a run's requests, events and summary.

    Raises:
        BadInput: as ``run_folder_name`` raises.
    """
    return aerie_home() / "runs" / run_folder_name(run_id)


def run_folder_name(run_id: str) -> str:
    """Name of a run's folder.

    Raises:
        BadInput: the run's id, which Airflow lets its users choose, is no name for a folder.
    """
    name = run_id.replace("/", "_").replace(":", "-")
    if name in ("", ".", "..") or not name.isprintable():
        raise BadInput(f"run {run_id!r}: its id is no name for a folder: trigger it again, with another id or none")
    return name


def chosen_settings() -> Path:
    """A link to the configuration that the local stack was last started with; the demo's where there is none."""
    return aerie_home() / "config.yaml"


def settings_path() -> Path:
    """The pipeline's configuration: ``AERIE_CONFIG``, else the one that the local stack was last started with."""
    given = os.environ.get("AERIE_CONFIG")
    if not given or (Path(given).absolute() == chosen_settings().absolute() and chosen_settings().is_symlink()):
        return stack_settings_path()
    return Path(given)


def stack_settings_path() -> Path:
    """The configuration that the local stack was last started with, the demo's where it never was."""
    chosen = chosen_settings()
    return chosen.readlink() if chosen.is_symlink() else PROJECT_ROOT / "demo" / "config.yaml"


def python_of(environment: Literal["airflow", "serve", "model"]) -> Path:
    """Interpreter of one of the three environments (``AERIE_AIRFLOW_PYTHON`` and so on override it).

    Raises:
        BadInput: the environment has not been made.
    """
    override = os.environ.get(f"AERIE_{environment.upper()}_PYTHON")
    python = Path(override) if override else aerie_home() / "envs" / environment / "bin" / "python"
    if not python.exists():
        raise BadInput(f"{python}: the {environment} environment is not there; run ./aerie setup")
    return python


def variables_of(environment: Literal["airflow", "serve", "model"]) -> dict[str, str]:
    """Environment variables for a process that runs in one of the three environments."""
    hidden = () if environment == "airflow" else CONTROL_SIDE_VARIABLES
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(HIDDEN_PREFIXES) and name not in hidden
    }
    return {**kept, "PYTHONPATH": str(PROJECT_ROOT / "include"), "PYTHONUNBUFFERED": "1"}


def owner_database_url() -> str:
    """URL of the user that owns the tables of Aerie's database and migrates them (``AERIE_DATABASE_OWNER_URL``).

    Without the variable it is the pipeline's own user.
    """
    return os.environ.get("AERIE_DATABASE_OWNER_URL") or database_url()


def dashboard_database_url() -> str:
    """URL of the user that only reads (``AERIE_DATABASE_DASHBOARD_URL``), else of the pipeline's."""
    return os.environ.get("AERIE_DATABASE_DASHBOARD_URL") or database_url()


def database_url() -> str:
    """URL of Aerie's own database (``AERIE_DATABASE_URL``).

    Raises:
        BadInput: the variable is not set.
    """
    url = os.environ.get("AERIE_DATABASE_URL")
    if not url:
        raise BadInput(
            "AERIE_DATABASE_URL is not set: start the local stack with ./aerie up, or set it to a postgresql:// URL"
        )
    return url
