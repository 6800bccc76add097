"""The report of an edition's corpus: a page that ``merge`` wrote, handed out as it is."""

from fastapi import APIRouter, HTTPException, Response, status

from aerie_dashboard.corpus_report import corpus_report_of

router = APIRouter()

# The report has its styles inside, and nothing else: no script, no picture, no address. What is not the report's own
# could do nothing, nor would it be of this server's origin.
POLICY = "; ".join(
    (
        "default-src 'none'", "style-src 'unsafe-inline'", "form-action 'none'", "base-uri 'none'",
        "frame-ancestors 'self'", "sandbox",
    )
)  # fmt: skip


@router.get("/editions/{edition}/corpus/report")
def read_corpus_report(edition: str) -> Response:
    """The report, of the corpus that the edition has now."""
    report = corpus_report_of(edition)
    if report is None:
        raise _no_report(edition)
    try:
        content = report.read_bytes()
    except FileNotFoundError as error:  # merge puts another corpus in its place
        raise _no_report(edition) from error
    return Response(content, media_type="text/html", headers={"Content-Security-Policy": POLICY})


def _no_report(edition: str) -> HTTPException:
    return HTTPException(
        status.HTTP_404_NOT_FOUND,
        f"edition {edition} has no report of a corpus here: nothing of it was merged, or its data is elsewhere",
    )
