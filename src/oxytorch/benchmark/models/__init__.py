"""Whole models next to their peers."""
