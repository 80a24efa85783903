"""TimeBridge (Liu et al., ICML 2025, arXiv 2410.04442); weights have the names of the authors' code."""
