"""Answers that follow a grammar: `source.py` what the configuration names, `backend.py` the library, `rows.py` the trees."""
