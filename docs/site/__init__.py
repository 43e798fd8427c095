"""The documentation as a site: `python -m docs.site` writes its pages and builds it."""
