"""Verbs of the program: each a function that is handed what was typed, and returns the exit code. Nothing heavy is loaded by an
import of one."""
