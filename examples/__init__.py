"""Runnable examples; start with README.md in this folder."""
