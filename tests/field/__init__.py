"""Why this framework exists: 22 failures that real users met on GCU, ROCm and CUDA servers, one module each.

Each module tells the story, reproduces the failure with stock tools where that is possible on a machine without cards
(on simulated ones, or on the CPU), and then shows that with exp it cannot happen, or is named on the first line.
"""
