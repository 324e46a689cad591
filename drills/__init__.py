"""Drills on the attention of an LLM inference engine: written by you, judged by one shared suite."""
