"""Settings that must stand before torch and Gradio are imported by any test."""
import os

os.environ["OMP_WAIT_POLICY"] = "passive"                 # two busy-waiting threads are slower than one on shared cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
