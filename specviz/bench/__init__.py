"""Measurements that can be repeated from the command line. They know the engine and everything but the user interface."""
