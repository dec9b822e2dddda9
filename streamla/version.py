"""The version, said once: the build reads it here, results are labelled with it."""

__version__ = "0.1.0"
