"""``python -m examples.tree_decoding``: decode prompts by compiled trees, and check them."""

import argparse
import os
import sys
from pathlib import Path

__all__ = ["main", "parse_arguments"]

SHIPPED = Path(__file__).resolve().parent.parent / "small-hybrid"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.tree_decoding", description=__doc__)
    parser.add_argument(
        "--model",
        type=Path,
        default=SHIPPED,
        metavar="DIR",
        help="checkpoint folder (default: the small model shipped here)",
    )
    parser.add_argument("--template", default="(2,2,1)", help="draft tree, as in bolegen compile")
    parser.add_argument("--drafter", choices=("mtp", "ngram"), default="mtp")
    parser.add_argument("--prompts", type=int, default=1, metavar="K")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="tokens a prompt")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is one"
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the rounds there")
    return parser.parse_args(arguments)


def main() -> int:
    """0 when the output is plain decoding's, 1 when it is not, 2 for wrong arguments."""
    options = parse_arguments()
    import torch

    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cpu":
        # read by Triton when it is imported, which transformers does
        os.environ["TRITON_INTERPRET"] = "1"
    from bolegen.errors import BolegenError

    from .run import run

    try:
        return run(options)
    except (BolegenError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
