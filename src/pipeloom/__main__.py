"""``python -m pipeloom`` is ``pipeloom``."""

from pipeloom.cli.main import main

if __name__ == "__main__":
    main()
