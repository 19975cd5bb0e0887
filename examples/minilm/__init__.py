"""Sentence embeddings with the all-MiniLM-L6-v2 encoder, every tensor operation a rudnn kernel."""
