"""PostgreSQL: what the pipeline knows, beside what lies on disk. SQL stays in this package."""
