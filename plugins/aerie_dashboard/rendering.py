"""Pages from templates. Whatever is stored is text: the templates escape it, and a missing name is an error."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from aerie_dashboard import PREFIX
from aerie_dashboard.documents import Unreadable
from aerie_dashboard.formatting import FILTERS

FOLDER = Path(__file__).parent


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(FILTERS)
    environment.tests["unreadable"] = lambda value: isinstance(value, Unreadable)
    return environment


ENVIRONMENT = _environment()


def render(request: Request, template: str, *, status_code: int = 200, **context: Any) -> HTMLResponse:
    """A page, or a part of one.

    Every template has ``root`` (the dashboard's path), ``airflow`` (that of Airflow's own pages), ``now``, and
    ``may_act``: whether the user may change something. Of whoever was turned away before that was asked, nobody may.
    """
    root = request.scope["root_path"]
    text = ENVIRONMENT.get_template(template).render(
        root=root,
        airflow=root.removesuffix(PREFIX),
        now=datetime.now(UTC),
        may_act=getattr(request.state, "may_act", False),
        **context,
    )
    return HTMLResponse(text, status_code)
