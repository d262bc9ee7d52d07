"""Text in, tokens out; tokens in, text out. Nothing here knows of a model's weights."""
