"""`python -m specresearch` and the console script: the command line of cli.py, interruptible from the first moment."""

import sys


def main() -> None:
    try:
        from specresearch import cli  # takes seconds, so Ctrl-C must be caught around it
    except KeyboardInterrupt:
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
