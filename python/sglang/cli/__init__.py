"""The command ``sglang``."""
