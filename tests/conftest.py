"""Settings that must stand before torch and Gradio are imported by any test."""
import os

from specviz.environment import ENVIRONMENT

os.environ.update(ENVIRONMENT)                            # huge pages, and no busy-waiting threads: several times as fast in a virtual machine
os.environ.setdefault("OMP_NUM_THREADS", "1")
