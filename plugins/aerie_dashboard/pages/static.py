"""Style sheets and scripts, for those who may see the pages; a mount of a folder would be open to strangers."""

from fastapi import APIRouter, HTTPException, status
from fastapi.responses import FileResponse

from aerie_dashboard.rendering import FOLDER

router = APIRouter()

MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".md": "text/plain"}
FILES = {path.name: path for path in (FOLDER / "static").iterdir() if path.suffix in MEDIA_TYPES}


@router.get("/static/{name}")
def read_static(name: str) -> FileResponse:
    """One of the dashboard's own files."""
    if name not in FILES:
        raise HTTPException(status.HTTP_404_NOT_FOUND, "the dashboard has no such file")
    path = FILES[name]
    # Browsers ask again with the file's tag, and get the new one as soon as there is one.
    return FileResponse(path, media_type=MEDIA_TYPES[path.suffix], headers={"Cache-Control": "private, no-cache"})
