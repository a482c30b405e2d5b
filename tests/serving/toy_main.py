"""`python -m tests.serving.toy_main FOLDER SECONDS`: a toy server as a process of its own, each forward taking SECONDS."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dspine.common import runtimes
from dspine.common.serving.server import run
from tests.serving.toys import Point, ToyRuntime, toy_engine, toy_settings


def main() -> None:
    folder, slow = Path(sys.argv[1]), float(sys.argv[2])
    runtime = ToyRuntime()
    runtimes._registered = lambda: {"toy": Point(runtime)}

    def ready(address: str, summary: dict[str, Any]) -> None:
        print(address, flush=True)

    sys.exit(run(lambda: toy_engine(folder, slow=slow), toy_settings(grace=20.0), ready))


if __name__ == "__main__":
    main()
