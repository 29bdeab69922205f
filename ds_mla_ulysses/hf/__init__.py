"""Hugging Face models: which are supported, and how they are patched and restored."""
