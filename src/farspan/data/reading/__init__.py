"""Files, URLs and formats to records."""
