"""Measuring a machine; see README.md."""
