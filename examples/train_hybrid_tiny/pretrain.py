"""Step 2 (GPU): pretrain hybrid-tiny.

python examples/train_hybrid_tiny/pretrain.py examples/train_hybrid_tiny/pretrain.yaml KEY=VALUE... [--resume]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dspine.common.errors import DSpineError
from dspine_cuda.training.hybrid_config import load_pretrain_config


def main() -> int:
    """Run; bad input is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(description="Pretrain hybrid-tiny; the last line of output is one JSON object.")
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value, over the file")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in output_dir")
    options = parser.parse_args()
    from dspine_cuda.training.hybrid_pretrain import Pretrainer

    try:
        summary = Pretrainer(load_pretrain_config(options.config, options.overrides), options.resume).run()
    except DSpineError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(json.dumps(summary) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
