"""How Airflow's components connect to its database; Airflow is told this module's name when they start."""

from collections.abc import Mapping

CONNECT_ARGS: Mapping[str, str] = {"options": "-c idle_in_transaction_session_timeout=60s"}
"""A component that is killed leaves processes that share its connection, such as a scheduler's workers with their
tasks. PostgreSQL takes it for alive, and would keep its locks, those that every scheduler needs among them, for good.
"""
