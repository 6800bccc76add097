-- Run once, when PostgreSQL makes its data directory, which makes the database aerie itself.
CREATE DATABASE airflow;
