"""States of frameworks, ready to train: one file each, which loads nothing before it is used."""
