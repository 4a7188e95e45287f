"""`python -m headrace.cli` is `headrace`.

For a checkout that is not installed, and for tests that start a real process.
"""

from headrace.cli import main

main()
