"""Grading: the suite in a process of its own, watched from outside, where a missing result is a failure."""
