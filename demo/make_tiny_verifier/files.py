"""Writing files so that a reader never sees half of one."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced_directory(directory: Path) -> Iterator[Path]:
    """Yields a temporary directory whose files, once all are written, are renamed into `directory`.

    Other files in `directory` stay. Nothing is renamed if the body raises.
    """
    directory.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield temporary
        for file in sorted(temporary.iterdir()):
            file.chmod(0o644)
            file.replace(directory / file.name)
    finally:
        shutil.rmtree(temporary)
