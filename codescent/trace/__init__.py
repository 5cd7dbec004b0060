"""In: files of torch's profiler (Chrome traces). Out: their events, times of intervals, operators; several as one.
Does not import torch, and does not know a Plan (report/ does)."""
