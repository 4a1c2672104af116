"""`csd bench`: seconds per picture against transformers eager, their parts, and the least this machine allows."""
