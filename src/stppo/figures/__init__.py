"""From recorded metrics to figures and the report; knows a run only by its files."""
