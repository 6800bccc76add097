"""Paths of the pages below the app's root, for links and redirections."""

from urllib.parse import quote


def run_path(run_id: str) -> str:
    """The page of a run."""
    return f"/runs/{quote(run_id, safe='')}"


def drafter_path(drafter_id: str) -> str:
    """The page of a drafter."""
    return f"/drafters/{quote(drafter_id, safe='')}"


def dataset_path(edition: str, dataset: str) -> str:
    """The page of a data set of an edition."""
    return f"/editions/{quote(edition, safe='')}/datasets/{quote(dataset, safe='')}"
