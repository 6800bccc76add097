"""``python -m aerie``: the command line."""

from aerie.cli import main

main()
