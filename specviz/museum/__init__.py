"""A tiny model on which exactness is shown and broken on purpose: proofs by drawing and by fractions, the classic faults, a meter.

It knows nothing of screens, and the engine knows nothing of it: every fault is a wrapper or a subclass of what the engine is given.
"""
