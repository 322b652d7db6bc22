"""The documentation's tools: the site, the pages that are generated, and what of them is stale."""
