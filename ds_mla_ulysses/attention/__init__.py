"""Attention classes: what travels between ranks, and what is computed where."""
