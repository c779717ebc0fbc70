"""Callbacks that are objects, one file a kind; each is loaded when it is used."""
