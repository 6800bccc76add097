import subprocess
import sys
from pathlib import Path

import pytest

from aerie.settings.machine import PROJECT_ROOT

TOOLS = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command", [("ruff", "check"), ("ruff", "format", "--check"), ("mypy", "include", "plugins")], ids=" ".join
)
@pytest.mark.slow
def test_the_checkers_have_nothing_to_say(command: tuple[str, ...]) -> None:
    tool, *arguments = command
    done = subprocess.run([TOOLS / tool, *arguments], cwd=PROJECT_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
