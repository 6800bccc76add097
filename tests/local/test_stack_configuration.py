import json
from contextlib import closing

import pytest

from aerie.errors import BadInput
from aerie.local.configuration import StackConfiguration, claim_airflow_port


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
