"""Training of the demo model: emoji pictures, patch codes, image decoder, language model."""
