"""The doctor: which attention kernel did a decode step land on, and what does it waste?

It reads profiler traces and needs no GPU. Nothing here imports torch, a kernel or an engine.
"""
