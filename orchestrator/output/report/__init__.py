"""report.html: one file that works offline."""
