"""Figures of ml_rag, each beside its floor, measured in the same run: ``make bench``."""
