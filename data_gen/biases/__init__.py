"""Injectors: how each structural bias turns a question into a pair."""
