"""What a run records, and how records are read and judged."""
