"""Reading a YAML file into a frozen model, with errors that name the file and the field."""

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from aerie.errors import BadInput, one_line

Model = TypeVar("Model", bound=BaseModel)


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds one mapping.

    Raises:
        BadInput: the file is missing, is not YAML, or holds something else.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not YAML: {error}") from error
    if not isinstance(document, dict):
        raise BadInput(f"{path}: expected a mapping at the top, found {type(document).__name__}")
    return document


def validate(model: type[Model], document: Any, *, where: Path, context: dict[str, Any] | None = None) -> Model:
    """Validate ``document`` as ``model``; the error lists every wrong field with what was expected.

    Raises:
        BadInput: a field is missing, unknown or of the wrong type.
    """
    try:
        return model.model_validate(document, context=context)
    except ValidationError as error:
        raise BadInput(f"{where}: {one_line(error)}") from error
