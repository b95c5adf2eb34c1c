"""The package's version. Here, so that a checkout that is not installed knows it too."""

__version__ = "0.2.0"
