import pytest
from hypothesis import settings

from .families import ALL, Family, family

# An example takes a millisecond; a deadline would only measure the machine's load.
settings.register_profile("boundary", deadline=None)
settings.load_profile("boundary")


@pytest.fixture(params=ALL)
def f(request: pytest.FixtureRequest) -> Family:
    """Each shipped family in turn."""
    return family(request.param)
