"""This project's own runs, on top of `stppo.figures`: arms, claims, verdicts."""
