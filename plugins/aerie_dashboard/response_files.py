"""The response log of a data set on this host, of whatever edition and data set a URL names."""

from pathlib import Path

from fastapi import HTTPException, status

from aerie.artefacts.layout import EditionFiles
from aerie.artefacts.response_log import log_files
from aerie.errors import BadInput
from aerie.settings.machine import data_root


def response_log_of(edition: str, dataset: str) -> Path:
    """The live file of a response log, there or not; all of the log's files lie below the data root.

    Raises:
        HTTPException: 404, where the names are none of an edition and a data set, or a link leads out of the data root.
    """
    root = data_root().resolve()
    try:
        log = EditionFiles(root, edition).dataset(dataset).responses
    except BadInput as error:
        raise HTTPException(status.HTTP_404_NOT_FOUND, str(error)) from error
    if not all(path.resolve().is_relative_to(root) for path in log_files(log)):
        raise HTTPException(status.HTTP_404_NOT_FOUND, "the response log of this data set is not below the data root")
    return log
