"""The report of an edition's corpus on this host, of whatever edition a URL or the store names."""

from pathlib import Path

from aerie.artefacts.layout import EditionFiles
from aerie.errors import BadInput
from aerie.settings.machine import data_root


def corpus_report_of(edition: str) -> Path | None:
    """The report; None where there is none, the name is none of an edition, or a link leads out of the data root."""
    root = data_root().resolve()
    try:
        report = EditionFiles(root, edition).corpus_report
    except BadInput:
        return None
    return report if report.is_file() and report.resolve().is_relative_to(root) else None
