-- Run once by psql, when PostgreSQL makes its data directory, which makes the owner and its database aerie.
-- Aerie's two other users are made by "aerie db migrate" (docker/initialise).
CREATE ROLE airflow LOGIN;
CREATE DATABASE airflow OWNER airflow;
REVOKE ALL ON DATABASE aerie, airflow, postgres FROM PUBLIC;
\i /etc/aerie/passwords.sql
