-- Makes the passwords of PostgreSQL's users those of the secrets; run again after these changed:
--   docker compose exec postgres psql --username aerie --file /etc/aerie/passwords.sql
\set owner `cat /run/secrets/postgres_password`
\set airflow `cat /run/secrets/airflow_database_password`
ALTER ROLE aerie PASSWORD :'owner';
ALTER ROLE airflow PASSWORD :'airflow';
