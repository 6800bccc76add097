"""The Compose file, as far as it can be checked without a Docker engine."""

import json
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from psycopg2 import sql
from typer.testing import CliRunner

from aerie.cli import app
from aerie.errors import Retryable
from aerie.local.configuration import StackConfiguration
from aerie.local.postgres import Cluster, ensure_database
from aerie.placement import EDGE_EXECUTOR
from aerie.ports import free_port
from aerie.settings.machine import PROJECT_ROOT
from aerie.store.connection import connect, connected
from aerie.store.migrate import migrate
from aerie.store.queries.alerts import list_alerts, record_alert
from aerie.store.queries.ledger import LedgerRow, write_rows
from aerie.store.queries.runs import record_run
from aerie.store.roles import grant_rights

ONE_SHOT = {"initialise"}
ON_THE_GPUS = {"scheduler-gpu", "sglang", "sglang-deploy"}
OF_ONE_HOST_ONLY = {"AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT", "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT"}


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that docker/make-secrets makes."""
    folder = tmp_path_factory.mktemp("docker")
    script = shutil.copy2(PROJECT_ROOT / "docker" / "make-secrets", folder)
    subprocess.run([script], check=True, capture_output=True, timeout=60)
    return folder / "secrets"


@pytest.mark.parametrize("name", ["docker-compose.yaml", "docker/remote-gpus.yaml"])
def test_the_file_has_the_schema_of_the_compose_specification(name: str) -> None:
    tool = Path(sys.executable).parent / "check-jsonschema"
    command = [tool, "--builtin-schema", "vendor.compose-spec", PROJECT_ROOT / name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_image_of_others_is_one_version_and_not_whatever_is_latest(services: dict[str, Any]) -> None:
    for name, service in services.items():
        tag = service["image"].partition(":")[2]
        assert re.match(r"v?\d+\.\d+", tag), f"{name}: {service['image']}"


def test_a_fresh_host_can_build_each_image_of_ours_in_every_profile(services: dict[str, Any]) -> None:
    """Compose pulls an image that no service of the profile builds, and ours is in no registry."""
    started = [(profile, service) for service in services.values() for profile in service["profiles"]]
    used = {(profile, service["image"]) for profile, service in started if service["image"].startswith("aerie-")}
    built = {(profile, service["image"]) for profile, service in started if "build" in service}
    assert {profile for profile, _ in used} == {"control", "gpu", "deploy"}
    assert used <= built


def test_nothing_listens_beyond_this_host_unless_asked(services: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published.keys() == {"api-server", "sglang-deploy"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert all(service.get("network_mode") is None for service in services.values())


def test_a_service_that_dies_is_started_again_and_one_that_hangs_is_seen(services: dict[str, Any]) -> None:
    for name, service in services.items():
        if name in ONE_SHOT:
            assert service["restart"] == "no"
        else:
            assert service["restart"] == "unless-stopped", name
            assert service["healthcheck"]["test"][0] == "CMD", name


def test_no_service_can_take_the_hosts_memory(services: dict[str, Any]) -> None:
    assert all(service["deploy"]["resources"]["limits"]["memory"] for service in services.values())


def test_the_gpus_are_reserved_where_they_are_used_and_nowhere_else(services: dict[str, Any]) -> None:
    for name, service in services.items():
        devices = service["deploy"]["resources"].get("reservations", {}).get("devices", [])
        assert [device["capabilities"] for device in devices] == ([["gpu"]] if name in ON_THE_GPUS else []), name
    assert services["sglang"]["shm_size"]


def test_two_schedulers_cannot_run_side_by_side(services: dict[str, Any]) -> None:
    assert services["scheduler"]["container_name"] == services["scheduler-gpu"]["container_name"]
    assert set(services["scheduler"]["profiles"]).isdisjoint(services["scheduler-gpu"]["profiles"])


def test_the_server_reaches_neither_database_nor_its_secrets(services: dict[str, Any]) -> None:
    assert set(services["sglang"]["networks"]).isdisjoint(services["postgres"]["networks"])
    assert "secrets" not in services["sglang"]


def test_a_container_writes_to_its_volumes_and_logs_that_end(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["logging"]["options"]["max-size"], name
        # SGLang's own image compiles kernels in places that only a GPU shows: docs/gpu-checklist.md.
        assert service.get("read_only", False) == (not name.startswith("sglang")), name
        assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"]), name


def test_only_one_short_container_may_change_tables_and_the_web_server_only_reads(services: dict[str, Any]) -> None:
    owners = {"postgres_password", "aerie_database_owner_url"}
    holders = {name for name, service in services.items() if owners & set(mounted(service).values())}
    assert holders == {"postgres", "initialise"}
    assert mounted(services["api-server"])["aerie_database_url"] == "aerie_database_dashboard_url"
    assert mounted(services["scheduler"])["aerie_database_url"] == "aerie_database_url"


def test_the_server_sees_the_same_paths_as_the_tasks_that_ask_for_it(services: dict[str, Any]) -> None:
    of_tasks = [volume for volume in services["scheduler-gpu"]["volumes"] if "/etc/aerie" not in str(volume)]
    assert services["sglang"]["volumes"] == of_tasks


def test_a_drafter_is_deployed_without_the_pipeline_its_database_or_its_secrets(services: dict[str, Any]) -> None:
    deployed = {name: service for name, service in services.items() if "deploy" in service["profiles"]}
    assert deployed.keys() == {"deploy", "sglang-deploy"}
    needed = {other for service in deployed.values() for other in service.get("depends_on", {})}
    assert needed <= deployed.keys()
    assert not any(service.get("secrets") for service in deployed.values())
    assert all("control" not in service["networks"] for service in deployed.values())
    program, module, name, *arguments = deployed["deploy"]["command"]
    assert (program, module, name) == ("python", "-m", "aerie")
    shown = CliRunner().invoke(app, [arguments[0], "--help"])
    assert shown.exit_code == 0
    port = arguments[arguments.index("--port") + 1]
    assert deployed["sglang-deploy"]["ports"][0].endswith(f":{port}")
    assert f":{port}/" in str(deployed["deploy"]["healthcheck"]["test"])
    assert deployed["sglang-deploy"]["volumes"] == services["sglang"]["volumes"]


def test_airflow_is_set_as_it_is_by_the_local_stack(services: dict[str, Any]) -> None:
    here = StackConfiguration.make().environment()
    there = {name.removesuffix("_CMD") for name in services["scheduler"]["environment"]}
    assert {name for name in here if name.startswith("AIRFLOW__")} - there == OF_ONE_HOST_ONLY
    same = (
        "CORE__LOAD_EXAMPLES", "CORE__DAGS_ARE_PAUSED_AT_CREATION", "USAGE_DATA_COLLECTION__ENABLED",
        "DAG_PROCESSOR__REFRESH_INTERVAL",
    )  # fmt: skip
    for name in (f"AIRFLOW__{option}" for option in same):
        assert services["scheduler"]["environment"][name] == here[name]


def test_gpu_hosts_elsewhere_need_no_other_service_and_reach_no_secret_but_the_keepers(
    services: dict[str, Any],
) -> None:
    remote = yaml.safe_load((PROJECT_ROOT / "docker" / "remote-gpus.yaml").read_text(encoding="utf-8"))
    of_airflow = {name for name, service in services.items() if service["image"].startswith("aerie-airflow")}
    assert set(remote["services"]) == of_airflow - {"scheduler-gpu", "deploy"}
    data_root = "/var/lib/aerie/data"  # of AERIE_HOME in the image
    for service in remote["services"].values():
        variables = service["environment"]
        assert EDGE_EXECUTOR in variables["AIRFLOW__CORE__EXECUTOR"].split(",")
        assert Path(variables["AERIE_SERVER_FOLDER"]).is_relative_to(data_root)
        assert variables["AERIE_KEEPER_TOKEN_FILE"] == "/run/secrets/keeper_token"
        assert service["secrets"] == list(remote["secrets"]) == ["keeper_token"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_pools_that_tasks_wait_for_are_made_and_those_that_a_person_widened_stay(tmp_path: Path) -> None:
    """The lines of docker/initialise that are of pools, with Airflow's own commands."""
    script = (PROJECT_ROOT / "docker" / "initialise").read_text(encoding="utf-8")
    _, first, lines = script.partition('folder="$(mktemp -d)"')
    commands = "airflow db migrate; airflow pools set aerie_server 5 mine --include-deferred"
    variables = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "AIRFLOW_HOME": str(tmp_path), "TMPDIR": str(tmp_path),
        "PYTHONPATH": str(PROJECT_ROOT / "include"), "AERIE_CONFIG": str(PROJECT_ROOT / "demo" / "config.yaml"),
    }  # fmt: skip
    shown = f"set -e; {commands}; {first}{lines}\nairflow pools export {tmp_path}/after.json"
    done = subprocess.run(["sh", "-c", shown], env=variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    pools = json.loads((tmp_path / "after.json").read_text())
    assert {name: pool["slots"] for name, pool in pools.items() if name.startswith("aerie_")} == {
        "aerie_server": 5, "aerie_gpus": 1,
    }  # fmt: skip
    assert (pools["aerie_server"]["description"], pools["aerie_server"]["include_deferred"]) == ("mine", True)


def mounted(service: dict[str, Any]) -> dict[str, str]:
    """Secrets of a service: the name of its file in the container, and which secret that is."""
    asked = [{"source": one, "target": one} if isinstance(one, str) else one for one in service.get("secrets", [])]
    return {one["target"]: one["source"] for one in asked}


def test_every_secret_is_declared_and_made(compose: dict[str, Any], services: dict[str, Any], secrets: Path) -> None:
    made = {path.name for path in secrets.iterdir()}
    assert {Path(secret["file"]).name for secret in compose["secrets"].values()} == made == set(compose["secrets"])
    for name, service in services.items():
        assert set(mounted(service).values()) <= made, name
        used = set(re.findall(r"/run/secrets/([\w.]+)", str(service.get("environment", {}))))
        assert used <= set(mounted(service)), name


def test_secrets_are_readable_in_containers_and_closed_to_others_on_the_host(secrets: Path) -> None:
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets.iterdir()} == {0o444}


def test_making_secrets_again_keeps_those_that_a_database_already_knows(secrets: Path) -> None:
    before = {path.name: path.read_bytes() for path in secrets.iterdir()}
    subprocess.run([secrets.parent / "make-secrets"], check=True, capture_output=True, timeout=60)
    assert {path.name: path.read_bytes() for path in secrets.iterdir()} == before


@pytest.fixture
def cluster(secrets: Path) -> Iterator[Cluster]:
    """PostgreSQL as the service's image first starts it: the owner, and the database of its name."""
    with started(secrets) as made:
        yield made


@pytest.fixture
def other_cluster(secrets: Path) -> Iterator[Cluster]:
    """Another one."""
    with started(secrets) as made:
        yield made


@contextmanager
def started(secrets: Path) -> Iterator[Cluster]:
    base = Path(tempfile.mkdtemp(prefix="aerie-test-"))
    base.chmod(0o755)
    made = Cluster(base / "postgres", free_port(), (secrets / "postgres_password").read_text())
    made.start()
    ensure_database(made.url("aerie"))
    yield made
    made.stop()
    shutil.rmtree(base)


def run_sql(cluster: Cluster, script: str, secrets: Path) -> None:
    """Run a script of ``docker/`` as the service's image does, with the secrets from where they are here."""
    folder = cluster.folder.parent / "scripts"
    folder.mkdir(exist_ok=True)
    for name in ("databases.sql", "passwords.sql"):
        text = (PROJECT_ROOT / "docker" / name).read_text(encoding="utf-8")
        text = text.replace("/etc/aerie", str(folder)).replace("/run/secrets", str(secrets))
        (folder / name).write_text(text, encoding="utf-8")
    command = [cluster.binaries() / "psql", "--set", "ON_ERROR_STOP=1", "--no-psqlrc", "--file", folder / script]
    subprocess.run([*command, cluster.url("aerie")], check=True, timeout=60)


def urls_of(cluster: Cluster, secrets: Path) -> dict[str, str]:
    """URLs of the secrets, where a cluster stands for the service."""
    files = {
        "owner": "aerie_database_owner_url", "pipeline": "aerie_database_url",
        "dashboard": "aerie_database_dashboard_url", "airflow": "airflow_database_url",
    }  # fmt: skip
    here = f"@127.0.0.1:{cluster.port}"
    return {
        user: (secrets / name).read_text().replace("+psycopg2", "").replace("@postgres:5432", here)
        for user, name in files.items()
    }


@pytest.mark.slow
def test_each_user_of_the_database_reaches_its_own_and_secrets_can_be_changed(
    cluster: Cluster, secrets: Path, tmp_path: Path
) -> None:
    run_sql(cluster, "databases.sql", secrets)
    new = shutil.copytree(secrets, tmp_path / "secrets")
    for folder in (secrets, new):
        if folder == new:  # as docs/operations.md says
            for path in new.glob("*database*"):
                path.unlink()
            (new / "postgres_password").unlink()
            subprocess.run([shutil.copy2(secrets.parent / "make-secrets", tmp_path)], check=True, timeout=60)
            run_sql(cluster, "passwords.sql", new)
            cluster = replace(cluster, password=(new / "postgres_password").read_text())
        urls = urls_of(cluster, folder)
        migrate(urls["owner"])
        grant_rights(urls["owner"], pipeline_url=urls["pipeline"], dashboard_url=urls["dashboard"])
        for url in urls.values():
            connect(url).close()
        for url, other in ((urls["pipeline"], "airflow"), (urls["dashboard"], "airflow"), (urls["airflow"], "aerie")):
            with pytest.raises(Retryable, match="permission denied for database"):
                connect(f"{url.rpartition('/')[0]}/{other}")


def documented(tool: str) -> list[list[str]]:
    """What docs/operations.md lets PostgreSQL's service run: the tool's arguments, one list a command."""
    text = (PROJECT_ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    return [line.split() for line in re.findall(rf"^docker compose exec -T postgres {tool} (.*) [<>]", text, re.M)]


def rows_of(url: str) -> dict[str, list[Any]]:
    """Every row of every table of a database, by the table's name."""
    with connected(url) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace")
        tables = [name for (name,) in cursor.fetchall()]
        found = {}
        for name in tables:
            cursor.execute(sql.SQL("SELECT t::text FROM {} t ORDER BY 1").format(sql.Identifier(name)))
            found[name] = cursor.fetchall()
        return found


def fill(urls: Mapping[str, str]) -> None:
    """A store as the pipeline leaves it, and something of Airflow's."""
    migrate(urls["owner"])
    grant_rights(urls["owner"], pipeline_url=urls["pipeline"], dashboard_url=urls["dashboard"])
    with connected(urls["pipeline"]) as connection:
        record_run(connection, run_id="run", dag_id="eagle3_pipeline", edition="main", config={"datasets": ["B1"]})
        record_alert(connection, reason="budget", message="Fünf <b>'\\'</b>", edition="main")
        samples = [LedgerRow(f"s{number}", "kept", completion_tokens=number) for number in range(300)]
        write_rows(connection, edition="main", dataset="B1_glaive", rows=samples)
    with connected(urls["airflow"]) as connection, connection, connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE dag_run (id serial PRIMARY KEY, run_id text); INSERT INTO dag_run (run_id) VALUES ('r')"
        )


@pytest.mark.slow
def test_a_backup_restored_into_a_new_cluster_is_the_same_store_and_goes_on(
    cluster: Cluster, other_cluster: Cluster, secrets: Path, tmp_path: Path
) -> None:
    """The commands of docs/operations.md between two real servers."""
    for one in (cluster, other_cluster):
        run_sql(one, "databases.sql", secrets)
    fill(urls_of(cluster, secrets))
    for tool, where, stream in (("pg_dump", cluster, "stdout"), ("pg_restore", other_cluster, "stdin")):
        for database, arguments in zip(("aerie", "airflow"), documented(tool), strict=True):
            assert database in arguments
            with (tmp_path / f"{database}.dump").open("wb" if stream == "stdout" else "rb") as file:
                at = ["--host", "127.0.0.1", "--port", str(where.port)]
                subprocess.run(
                    [where.binaries() / tool, *at, *arguments], **{stream: file}, check=True, timeout=120,
                    env={"PGPASSWORD": where.password},
                )  # fmt: skip
    old, new = (urls_of(one, secrets) for one in (cluster, other_cluster))
    assert len(rows_of(old["owner"])["samples"]) == 300
    for user in ("owner", "airflow"):
        assert rows_of(old[user]) == rows_of(new[user])
    migrate(new["owner"])
    grant_rights(new["owner"], pipeline_url=new["pipeline"], dashboard_url=new["dashboard"])
    with connected(new["pipeline"]) as connection:
        record_alert(connection, reason="canary", message="after it")
    with connected(new["dashboard"]) as connection:
        assert [alert["reason"] for alert in list_alerts(connection)] == ["canary", "budget"]
    with connected(new["airflow"]) as connection, connection, connection.cursor() as cursor:
        cursor.execute("INSERT INTO dag_run (run_id) VALUES ('next'); ALTER TABLE dag_run ADD COLUMN later int")


@pytest.mark.slow
def test_a_connection_comes_from_the_secret(services: dict[str, Any], secrets: Path, tmp_path: Path) -> None:
    variables = {
        name: str(value).replace("/run/secrets", str(tmp_path))
        for name, value in services["scheduler"]["environment"].items()
        if name.startswith("AIRFLOW__SECRETS__")
    }
    program = (
        "from airflow.secrets.local_filesystem import LocalFilesystemBackend\n"
        "from airflow.configuration import ensure_secrets_loaded\n"
        "(backend,) = [one for one in ensure_secrets_loaded() if isinstance(one, LocalFilesystemBackend)]\n"
        "print(getattr(backend.get_connection('aerie_alerts'), 'conn_type', None))"
    )
    said = []
    for text in ((secrets / "airflow_connections").read_text(), '{"aerie_alerts": {"conn_type": "apprise"}}'):
        (tmp_path / "airflow_connections.json").write_text(text)
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={"PATH": "/usr/bin:/bin", "AIRFLOW_HOME": str(tmp_path), **variables},
            capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        said.append(done.stdout.splitlines()[-1])
    assert said == ["None", "apprise"]


@pytest.mark.slow
def test_airflow_reads_its_secrets_from_their_files(services: dict[str, Any], secrets: Path, tmp_path: Path) -> None:
    variables = {
        name: str(value).replace("/run/secrets", str(secrets))
        for name, value in services["scheduler"]["environment"].items()
        if name.endswith("_CMD")
    }
    asked = ["core.fernet_key", "database.sql_alchemy_conn", "api.secret_key", "api_auth.jwt_secret"]
    program = f"from airflow.configuration import conf\nfor option in {asked}: print(conf.get(*option.split('.')))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": "/usr/bin:/bin", "AIRFLOW_HOME": str(tmp_path), **variables},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    files = ("airflow_fernet_key", "airflow_database_url", "airflow_api_secret", "airflow_jwt_secret")
    assert done.stdout.splitlines()[-4:] == [(secrets / name).read_text() for name in files]
