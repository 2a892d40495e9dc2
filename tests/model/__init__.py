"""Long random runs against a plain dict."""
