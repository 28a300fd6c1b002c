"""Configs: composed from YAML (`composition`), checked and built (`loading`), told apart (`identity`),
planned (`planned`)."""
