"""Hugging Face's libraries on Everstep."""
