import json
from contextlib import closing

import pytest

from aerie.errors import BadInput
from aerie.local.configuration import StackConfiguration, claim_airflow_port
from aerie.placement import EDGE_EXECUTOR
from aerie.settings.machine import PROJECT_ROOT


@pytest.fixture
def configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("AERIE_HOME", str(tmp_path))
    monkeypatch.delenv("AERIE_USERS", raising=False)
    return StackConfiguration.make()


def users(configuration):
    return configuration.environment()["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS"]


def test_users_are_the_administrator_unless_others_are_named(configuration, monkeypatch):
    assert users(configuration) == "admin:admin"
    monkeypatch.setenv("AERIE_USERS", "admin:admin,ada:viewer")
    assert users(configuration) == "admin:admin,ada:viewer"


def test_workers_of_other_hosts_are_let_in_only_where_the_configuration_places_stages_on_them(
    configuration, monkeypatch, tmp_path
):
    assert not [name for name in configuration.environment() if name.startswith("AIRFLOW__EDGE__")]
    placed = tmp_path / "config.yaml"
    demo = (PROJECT_ROOT / "demo" / "config.yaml").read_text()
    placed.write_text(f"{demo}\nplacement: {{train: {{executor: EdgeExecutor, queue: gpu-7}}}}\n")
    monkeypatch.setenv("AERIE_CONFIG", str(placed))
    variables = configuration.environment()
    assert variables["AIRFLOW__CORE__EXECUTOR"].split(",") == ["LocalExecutor", EDGE_EXECUTOR]
    assert variables["AIRFLOW__EDGE__API_ENABLED"] == "True"
    assert variables["AIRFLOW__EDGE__API_URL"].startswith(configuration.airflow_url)


def test_a_start_keeps_the_passwords_of_other_users(configuration, tmp_path):
    configuration.write_passwords()
    passwords = tmp_path / "airflow" / "passwords.json"
    passwords.write_text(json.dumps({"admin": "old", "ada": "hers"}))
    configuration.write_passwords()
    assert json.loads(passwords.read_text()) == {"admin": configuration.airflow_password, "ada": "hers"}


def test_who_owns_the_tables_is_told_to_no_process_of_the_stack(configuration, monkeypatch):
    monkeypatch.setenv("AERIE_DATABASE_URL", "postgresql://pipeline:p@host/store")
    monkeypatch.setenv("AERIE_DATABASE_OWNER_URL", "postgresql://owner:secret@host/store")
    variables = configuration.environment()
    assert variables["AERIE_DATABASE_URL"] == "postgresql://pipeline:p@host/store"
    assert not any(name.startswith("AERIE_") and "secret" in value for name, value in variables.items())
    assert configuration.airflow_database_url == "postgresql://owner:secret@host/store_airflow"


def test_a_stack_that_starts_beside_another_that_starts_gets_another_port(monkeypatch):
    monkeypatch.delenv("AERIE_PORT", raising=False)
    with closing(claim_airflow_port(8080)) as one, closing(claim_airflow_port(one.port)) as other:
        assert one.port != other.port
        monkeypatch.setenv("AERIE_PORT", str(other.port))
        with pytest.raises(BadInput, match=f"port {other.port} .* is in use"):
            claim_airflow_port(8080)


@pytest.mark.parametrize("asked", ["0", "65536", "http", ""])
def test_what_is_no_port_is_refused(monkeypatch, asked):
    monkeypatch.setenv("AERIE_PORT", asked)
    with pytest.raises(BadInput, match="is not a port"):
        claim_airflow_port(8080)
