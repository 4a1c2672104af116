"""A step graph made runnable: one small protocol and the engines behind it."""
