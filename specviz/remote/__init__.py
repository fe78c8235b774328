"""Attaching the screen to another inference server: its token stream becomes verification steps."""
