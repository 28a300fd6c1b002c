"""This project's own runs, on top of `stppo.results`: arms, claims, verdicts."""
