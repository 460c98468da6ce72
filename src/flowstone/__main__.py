"""`python -m flowstone` is the command line."""

from flowstone.cli import main

if __name__ == "__main__":
    main()
