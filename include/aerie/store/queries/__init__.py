"""Queries, by topic. Each takes an open connection and is one transaction."""
