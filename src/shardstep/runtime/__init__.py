"""Turns a plan into memory and messages."""
