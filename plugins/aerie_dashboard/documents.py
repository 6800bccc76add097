"""Stored documents as models: what lacks a field is shown as an error in its place, never as a zero."""

from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from aerie.errors import one_line

Model = TypeVar("Model", bound=BaseModel)


class Stored(BaseModel):
    """Base of what a page reads out of a stored document; fields that no page shows are left aside."""

    model_config = ConfigDict(frozen=True, extra="ignore")


@dataclass(frozen=True)
class Unreadable:
    """A stored document that cannot be shown: where it is, and what is wrong with it."""

    place: str
    problem: str


def read_document(model: type[Model], document: Any, *, place: str) -> Model | Unreadable:
    """A stored document as a model; ``place`` says where it is stored, for the person who has to look at it."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        return Unreadable(place, one_line(error))
