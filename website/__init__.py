"""The documentation as a site: `python -m website` writes its pages and builds it."""
