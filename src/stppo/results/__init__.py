"""From recorded metrics to tables, figures and the report; knows a run only by its files."""
